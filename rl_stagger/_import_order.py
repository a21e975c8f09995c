"""Isaac Gym refuses to load after torch, and this package imports torch: where a run needs Isaac Gym, it comes first.

Looks at the command line's words (`task=isaacgym/Ant`, `task=legged_gym/...`, `resume=` and `run=` of such a run) and
at the environment variable RL_STAGGER_ISAACGYM=1, for programs of one's own. Others pay for a few comparisons.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Mapping, Optional, Sequence

SIMULATORS = ("isaacgym", "legged_gym")
VARIABLE = "RL_STAGGER_ISAACGYM"
failure: Optional[BaseException] = None
"""What importing isaacgym raised here. Told when one of its tasks is made, not before."""


def wants_isaac_gym(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether these words of a command line, or the environment, name a task of Isaac Gym."""
    if environ.get(VARIABLE, "") not in ("", "0"):
        return True
    for argument in arguments:
        key, _, value = argument.partition("=")
        key = key.lstrip("+-")
        if key in ("task", "task.name") and any(_names_it(word.strip("'\" []")) for word in value.split(",")):
            return True
        if key in ("resume", "run", "run_dir") and value and _run_of_it(Path(value.strip("'\""))):
            return True
    return False


def _names_it(task: str) -> bool:
    return task.partition("/")[0] in SIMULATORS


def _run_of_it(path: Path) -> bool:
    """Whether `path` lies in a run directory whose config.yaml names such a task."""
    for folder in (path, *list(path.parents)[:2]):
        try:
            text = (folder / "config.yaml").read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        return re.search(rf"^\s+name: ['\"]?({'|'.join(SIMULATORS)})\b", text, flags=re.MULTILINE) is not None
    return False


def import_isaac_gym_first() -> None:
    """Import isaacgym where it is wanted and installed, and torch is not there yet."""
    global failure
    if "torch" in sys.modules or "isaacgym" in sys.modules or not wants_isaac_gym(sys.argv[1:], os.environ):
        return
    if importlib.util.find_spec("isaacgym") is None:
        return
    try:
        importlib.import_module("isaacgym")
    except Exception as error:
        failure = error


import_isaac_gym_first()
