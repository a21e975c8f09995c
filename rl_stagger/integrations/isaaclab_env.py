"""Isaac Lab's (and mjlab's) `RslRlVecEnvWrapper`. Written against Isaac Lab's source as published; tested on a double.

What differs from a plain rsl_rl environment: a partial reset exists (`reset(env_ids=...)` of the manager-based
environments, `_reset_idx` of the direct ones), `extras["final_obs"]` is given where `cfg.compute_final_obs` asks for
it, and `cfg.is_finite_horizon` says that time limits are true ends: the wrapper then leaves `extras["time_outs"]` out,
and only the cuts of the reset rule are marked.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Dict, Optional

from torch import Tensor

from rl_stagger.envs.base import Capability, Obs
from rl_stagger.integrations.base import Rule
from rl_stagger.integrations.lookup import reset_isaac_lab_rows
from rl_stagger.integrations.rsl_rl_env import FromRslRl, RslRlView, obs_of


class FromIsaacLab(FromRslRl):
    """The wrapper under our contract; the environment itself (`unwrapped`) does the resets."""

    extra_capabilities = frozenset({Capability.PARTIAL_RESET})

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        if getattr(host.unwrapped.cfg, "compute_final_obs", False):
            self.extra_capabilities = self.extra_capabilities | {Capability.FINAL_OBS}
        super().__init__(host, horizon_steps)

    def _reset_all(self) -> Obs:
        self.host.env.reset()  # the wrapper itself has no reset()
        self.last_obs = obs_of(self.host.get_observations())
        return dict(self.last_obs)

    def _reset_ids(self, ids: Tensor) -> None:
        reset_isaac_lab_rows(self.host.unwrapped, ids)

    def _final_obs(self, extras: Dict[str, Any]) -> Optional[Obs]:
        final = extras.get("final_obs") if Capability.FINAL_OBS in self.capabilities else None
        return None if final is None else obs_of(final)


def stagger_host(host: Any, rule: Rule) -> RslRlView:
    """Isaac Lab's or mjlab's wrapper under `rule`, as an rsl_rl environment with the wrapper's other attributes."""
    return RslRlView(rule.around(FromIsaacLab(host, rule.horizon_steps)), host)
