"""What keeps the spread up during training. Each way is a class entered in UPKEEPS.

`none` is enough where episodes seldom end before the time limit: environments then keep their distances.
"""

from __future__ import annotations

from typing import Dict, Type

from rl_stagger.envs.base import VecEnv


class Upkeep:
    """Called by the reset rule before every step."""

    def before_step(self, env: VecEnv) -> None:
        raise NotImplementedError


class NoUpkeep(Upkeep):
    """Nothing is moved after the bring-up."""

    def before_step(self, env: VecEnv) -> None:
        return None


UPKEEPS: Dict[str, Type[Upkeep]] = {"none": NoUpkeep}
