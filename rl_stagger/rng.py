"""Random generators that live on the device of what they fill, and whose state can be saved."""

from __future__ import annotations

import random
from typing import Any, Dict, List, Optional

import torch
from torch import Tensor


def make_generator(device: torch.device, seed: int) -> Optional[torch.Generator]:
    """A seeded generator on `device`; None on the "meta" device, which has no random numbers to draw."""
    if torch.device(device).type == "meta":
        return None
    return torch.Generator(device=device).manual_seed(seed)


def generator_state(generator: Optional[torch.Generator]) -> Optional[Tensor]:
    return None if generator is None else generator.get_state()


def set_generator_state(generator: Optional[torch.Generator], state: Optional[Tensor]) -> None:
    if generator is not None and state is not None:
        generator.set_state(state.cpu())


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (simulators draw from them)."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def global_rng_state() -> Dict[str, Any]:
    """The state of every global generator, as tensors and plain numbers only."""
    version, internal, gauss = random.getstate()
    state: Dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }
    numpy = _numpy()
    if numpy is not None:
        name, keys, pos, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], int(pos), int(has_gauss), float(cached)]
    return state


def set_global_rng_state(state: Dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    cuda: List[Tensor] = state.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([rng.cpu() for rng in cuda])
    numpy = _numpy()
    if numpy is not None and "numpy" in state:
        name, keys, pos, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), pos, has_gauss, cached))


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
