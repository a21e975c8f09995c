"""Checkpoints: one file holds one whole state; written atomically, checked when read."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from rl_stagger.errors import CheckpointError

FORMAT = "rl_stagger.checkpoint"
VERSION = 1
_NAME = re.compile(r"iter_(\d+)\.pt")


class CheckpointStore:
    """The folder checkpoints/ of a run: the newest `keep_last` files iter_<iteration>.pt, and best.pt.

    Saving removes files of later iterations: a run that went back to an earlier checkpoint has left that branch.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = Path(folder), keep_last

    def save(self, iteration: int, state: Dict[str, Any], best: bool) -> Path:
        """Write `state` (tensors, numbers, strings and containers of them); as best.pt too if `best`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "version": VERSION, "iteration": iteration, **state}
        path = self.folder / f"iter_{iteration:07d}.pt"
        _write(content, path)
        if best:
            _write(content, self.folder / "best.pt")
        files = list_checkpoints(self.folder)
        here = files.index(path) + 1
        for old in files[: max(0, here - self.keep_last)] + files[here:]:
            old.unlink()
        return path


def list_checkpoints(folder: Path) -> List[Path]:
    """Files iter_<iteration>.pt of `folder`, oldest iteration first, torn ones included."""
    found = [
        (int(match.group(1)), path) for path in Path(folder).glob("iter_*.pt") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def load_checkpoint(path: Path) -> Dict[str, Any]:
    """The state in `path`, on the CPU. CheckpointError for a missing, torn or foreign file names the last good one."""
    path = Path(path)
    fault = file_fault(path)
    if fault is None:
        try:
            state = torch.load(str(path), map_location="cpu", weights_only=True)
        except Exception as error:
            fault = f"cannot be read: {str(error).splitlines()[0]}"
        else:
            fault = _content_fault(state)
            if fault is None:
                return state
    raise CheckpointError(f"checkpoint {path} {fault}. {_last_good(path)}")


def file_fault(path: Path) -> Optional[str]:
    """What is wrong with the file as a file, or None. Reads all of it (the archive's checksums)."""
    if not path.is_file():
        return "does not exist"
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except Exception as error:  # a damaged directory makes zipfile raise whatever its content suggests
        return f"is torn or not a checkpoint ({error})"
    return f"is damaged in its part '{torn}'" if torn else None


def _content_fault(state: Any) -> Optional[str]:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return "was not written by rl_stagger"
    if state.get("version") != VERSION:
        return f"has format version {state.get('version')}; this rl_stagger reads version {VERSION}"
    return None


def _last_good(path: Path) -> str:
    for other in reversed(list_checkpoints(path.parent)):
        if other != path and file_fault(other) is None:
            return f"The last good one there is {other}"
    return f"There is no other good checkpoint in {path.parent}"


def _write(content: Dict[str, Any], path: Path) -> None:
    """Write beside `path` and rename: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# -- resume=... -----------------------------------------------------------------------------------------------------
def resolve_resume(resume: str, search_in: Path, key: str = "resume") -> Path:
    """The checkpoint file that `resume` names: "latest", a run directory or a file. `key`: what errors call it.

    "latest" is the newest checkpoint under `search_in`; folders without one do not count. Call it before the new run's
    folder is made.
    """
    if resume == "latest":
        files = [path for path in Path(search_in).rglob("checkpoints/iter_*.pt") if _NAME.fullmatch(path.name)]
        if not files:
            raise CheckpointError(f"{key}=latest: there is no checkpoint under {Path(search_in)}")
        return max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))
    path = Path(resume)
    if path.is_dir():
        files = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
        if not files:
            raise CheckpointError(f"{key}={resume}: there is no checkpoint in that folder")
        return files[-1]
    if not path.exists():
        raise CheckpointError(f"{key}={resume}: no such file or folder; give latest, a run directory or a checkpoint")
    return path


def run_dir_of(checkpoint: Path) -> Path:
    """The run directory a checkpoint belongs to."""
    parent = Path(checkpoint).parent
    return parent.parent if parent.name == "checkpoints" else parent
