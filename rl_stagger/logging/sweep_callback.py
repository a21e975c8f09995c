"""Collects a Hydra sweep's results into one table when its last job is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepTable(Callback):
    """Hydra callback, named in configs/config.yaml."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from rl_stagger.logging.table import print_sweep

        print_sweep(Path(config.hydra.sweep.dir))
