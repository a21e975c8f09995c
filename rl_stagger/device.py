"""Which device a run is on."""

from __future__ import annotations

import torch

from rl_stagger.errors import ConfigError, nearest


def pick_device(device: str) -> str:
    """`auto` becomes cuda:0 where there is one, else cpu. ConfigError for a device that is not there."""
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device}: {nearest(device, ['auto', 'cpu', 'cuda:0'])}") from None
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device}: rl_stagger trains on cpu and on cuda:<number>")
    if kind.type == "cuda" and (not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"device={device}: torch sees {torch.cuda.device_count()} CUDA devices here; use device=cpu")
    return "cuda:0" if device == "cuda" else device
