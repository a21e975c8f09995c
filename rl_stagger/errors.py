"""Errors with a meaning of their own. Every one names the field, the value and what would be right."""

from __future__ import annotations

import difflib
from typing import Iterable


class ConfigError(ValueError):
    """A setting that cannot work: unknown key, wrong type, impossible size."""


class CapabilityError(RuntimeError):
    """An environment was asked for something its simulator cannot do."""


class ContractError(ValueError):
    """An environment gave something other than the contract (`envs/base.py`) says."""


class SimulatorError(RuntimeError):
    """A simulator stopped working under a run."""


class NonFiniteError(FloatingPointError):
    """A NaN or an infinity in data or gradients; raised before the parameters are touched."""


class CheckpointError(RuntimeError):
    """A checkpoint that is torn, foreign, missing, or does not fit the run."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A sentence that names the valid `choices`, the one most like `name` first.

    >>> nearest("skil_chain", ["cartpole", "skill_chain"])
    "did you mean 'skill_chain'? Valid: cartpole, skill_chain"
    """
    valid = sorted(str(choice) for choice in choices)
    match = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    hint = f"did you mean '{match[0]}'? " if match else ""
    return f"{hint}Valid: {', '.join(valid) if valid else '(none)'}"
