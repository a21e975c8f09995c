"""A run's folder: what is written at its start and its end."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import torch

import rl_stagger
from rl_stagger.config import Config, to_tree
from rl_stagger.errors import ConfigError
from rl_stagger.logging.writers import read_json_lines, replace_file, strict_json

RUNS = Path("runs")


def task_folder(config: Config) -> Path:
    """runs/<task>, with what a file name cannot hold replaced."""
    return RUNS / re.sub(r"[^\w/.-]", "_", config.task.label or config.task.name)


def new_run_dir(config: Config) -> Path:
    """The folder for a new run; refuses one that holds a run already."""
    if config.run_dir is not None:
        path = Path(config.run_dir)
        if holds_run(path):
            go_on = f"continue it with resume=latest run_dir={path}, or " if any(path.glob("checkpoints/*.pt")) else ""
            raise ConfigError(f"run_dir={path}: this folder holds a run already; {go_on}give another folder")
        return _make(path, exist_ok=True)
    # A rule's name holds what was changed in it, maybe an expression: blanks, stars and brackets trouble a shell.
    name = config.run_name or re.sub(r"[^\w.,=+-]+", "", f"{config.reset.name[:120]}_seed{config.seed}")
    wanted = task_folder(config) / f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    path, copies = wanted, 1
    while True:
        try:
            return _make(path, exist_ok=False)
        except FileExistsError:
            copies += 1
            path = wanted.with_name(f"{wanted.name}_{copies}")


def _make(path: Path, exist_ok: bool) -> Path:
    """Make a run's folder. FileExistsError only where `exist_ok` is False and a folder is there."""
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"run_dir={path}: {error.strerror or error}; give a folder that can be made") from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a run's folder for this process. ConfigError where another one trains in it."""
    import fcntl

    with open(path / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"run_dir={path}: another process is training in this folder") from None
        yield


def holds_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", "config.yaml", "summary.json")) or any(
        path.glob("checkpoints/*.pt")
    )


def write_start(path: Path, config: Config, notes: List[str]) -> None:
    """config.yaml (what is in force) and environment.json (what it runs on; a resumed run adds itself to "resumes")."""
    from omegaconf import OmegaConf

    tree = to_tree(config)
    OmegaConf.save(OmegaConf.create(tree), str(path / "config.yaml"))
    now = {**environment(config.device), "notes": notes}
    file = path / "environment.json"
    if file.exists():
        first = json.loads(file.read_text(encoding="utf-8"))
        now = {**first, "resumes": [*first.get("resumes", []), now]}
    write_json(file, now)


def environment(device: str) -> Dict[str, Any]:
    """Versions, git commit, device and threads."""
    versions = {"rl_stagger": rl_stagger.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("numpy", "hydra", "mujoco", "warp", "mjlab", "gymnasium"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            versions[name] = str(module.__version__)
    on_cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "versions": versions,
        "git_commit": git_commit(),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def git_commit() -> Optional[str]:
    """The commit of the source that runs, "-dirty" if it was changed; None outside a git clone."""
    folder = str(Path(rl_stagger.__file__).resolve().parent)
    try:
        where = ["git", "-C", folder]
        # A wheel inside somebody else's clone is not that clone's code.
        tracked = subprocess.run([*where, "ls-files", "__init__.py"], capture_output=True, text=True, timeout=10)
        if tracked.returncode != 0 or not tracked.stdout.strip():
            return None
        commit = subprocess.run([*where, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*where, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode != 0:
        return None
    return commit.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def write_json(path: Path, content: Dict[str, Any]) -> None:
    """Atomically, so that a killed run leaves the old file or the new one."""
    replace_file(path, iter([strict_json(content, indent=2), "\n"]))


def read_metrics_lines(run_dir: Path) -> List[Dict[str, Any]]:
    """The lines of metrics.jsonl, see `read_json_lines`."""
    return read_json_lines(run_dir / "metrics.jsonl")
