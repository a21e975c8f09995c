"""K steps of N environments, written into storage that is allocated once.

Index rule: row t belongs to the transition that leaves obs[t]; obs has K + 1 rows, the last being the next rollout's
first.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor

from rl_stagger.algorithms.nets import ModuleNets, Nets
from rl_stagger.envs.base import Discrete, EnvSpec, Obs, Step, VecEnv, check_obs
from rl_stagger.errors import ContractError, NonFiniteError
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.rng import generator_state, make_generator, set_generator_state
from rl_stagger.stopwatch import Stopwatch

FLAGS = ("terminated", "truncated", "valid", "was_reset", "success", "cut", "frozen")


class StorageRow(NamedTuple):
    """Views of one step's storage, made once. Groups are in the storage's order."""

    obs: List[Tensor]
    final_obs: List[Tensor]
    action: Tensor
    params: Tensor
    reward: Tensor
    flags: Tensor
    """[7, N], in the order of `FLAGS`."""
    clocks: Tensor
    """[2, N], phase and clock."""


class Rollout:
    """Storage of one iteration. All tensors [K, N, ...] unless said otherwise."""

    def __init__(
        self,
        steps: int,
        num_envs: int,
        spec: EnvSpec,
        num_params: int,
        keep_final_obs: bool,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32, extra: int = 0) -> Tensor:
            return torch.zeros((steps + extra, num_envs, *shape), dtype=dtype, device=device)

        def zero_obs(name: str, extra: int) -> Tensor:
            return zeros(*spec.obs_shapes[name], dtype=spec.obs_dtype(name), extra=extra)

        self.steps, self.num_envs = steps, num_envs
        read = {*spec.actor_groups, *spec.critic_groups}
        self.obs = {name: zero_obs(name, 1) for name in spec.obs_shapes if name in read}
        """[K + 1, N, ...] per group that the nets read, in the group's own dtype."""
        self.final_obs = {name: zero_obs(name, 0) for name in spec.critic_groups} if keep_final_obs else None
        """The critic's groups of the state an episode ended in; rows read where truncated."""
        if isinstance(spec.action, Discrete):
            self.action = zeros(dtype=torch.int64)
        else:
            self.action = zeros(spec.action.size)
        self.reward, self.params = zeros(), zeros(num_params)
        self._flags = torch.zeros((steps, len(FLAGS), num_envs), dtype=torch.bool, device=device)
        self._clocks = torch.zeros((steps, 2, num_envs), dtype=torch.int64, device=device)
        self._unset = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._rows = [self._row(t) for t in range(steps)]
        self.logs: List[Dict[str, Any]] = []
        """What the task logged, step by step."""
        self.has_success = False

    def _row(self, t: int) -> StorageRow:
        return StorageRow(
            [x[t] for x in self.obs.values()],
            [] if self.final_obs is None else [x[t] for x in self.final_obs.values()],
            self.action[t],
            self.params[t],
            self.reward[t],
            self._flags[t],
            self._clocks[t],
        )

    def put_before(self, t: int, obs: Obs, phase: Tensor, clock: Tensor) -> StorageRow:
        """Write what transition t leaves from, before the env step: what an env reuses must not reach the storage.
        Returns the row, in which the action and the distribution's parameters are to be written."""
        row = self._rows[t]
        for name, x in zip(self.obs, row.obs):
            x.copy_(obs[name])
        torch.stack([phase, clock], out=row.clocks)
        return row

    def put_after(self, t: int, step: Step) -> None:
        """Write what came of transition t."""
        row, info = self._rows[t], step.info
        row.reward.copy_(step.reward)
        reset = info["reset"] if "reset" in info else step.done  # noqa: SIM401 (`done` is an operation)
        marks = [info.get(name, self._unset) for name in ("success", "cut", "frozen")]
        torch.stack([step.terminated, step.truncated, step.valid, reset, *marks], out=row.flags)
        if self.final_obs is not None:
            if step.final_obs is None:
                raise ContractError("Step.final_obs is None, but the environment claims Capability.FINAL_OBS")
            for name, x in zip(self.final_obs, row.final_obs):
                x.copy_(step.final_obs[name])
        self.has_success = self.has_success or "success" in info
        self.logs.append(info.get("log", {}))

    def finish(self, obs: Obs) -> None:
        """Write the observation after the last transition."""
        for name, x in self.obs.items():
            x[self.steps].copy_(obs[name])

    def first(self, steps: int) -> Rollout:
        """The first `steps` rows as a rollout of their own, in the same storage."""
        part = copy.copy(self)
        for name in ("action", "reward", "params", "_flags", "_clocks"):
            setattr(part, name, getattr(self, name)[:steps])
        part.obs = {name: x[: steps + 1] for name, x in self.obs.items()}
        if self.final_obs is not None:
            part.final_obs = {name: x[:steps] for name, x in self.final_obs.items()}
        part.steps = steps
        return part

    def flat_obs(self, steps: int) -> Obs:
        """The first `steps` rows of every group as [steps * N, ...]."""
        return {name: x[:steps].flatten(0, 1) for name, x in self.obs.items()}

    # One mask beside the other in memory, so that a step writes all of them at once; [K, N] bool each.
    @property
    def terminated(self) -> Tensor:
        return self._flags[:, 0]

    @property
    def truncated(self) -> Tensor:
        return self._flags[:, 1]

    @property
    def valid(self) -> Tensor:
        return self._flags[:, 2]

    @property
    def was_reset(self) -> Tensor:
        return self._flags[:, 3]

    @property
    def success(self) -> Tensor:
        return self._flags[:, 4]

    @property
    def cut(self) -> Tensor:
        return self._flags[:, 5]

    @property
    def frozen(self) -> Tensor:
        return self._flags[:, 6]

    @property
    def phase(self) -> Tensor:
        """True phase of obs[t] in steps; [K, N] int64."""
        return self._clocks[:, 0]

    @property
    def clock(self) -> Tensor:
        """Episode clock at obs[t] in steps; [K, N] int64."""
        return self._clocks[:, 1]

    @property
    def done(self) -> Tensor:
        return self.terminated | self.truncated

    @property
    def needs_final(self) -> Tensor:
        """[K, N] bool: transitions whose target reads the final observation."""
        return self.truncated & ~self.terminated & self.valid


class Estimates(NamedTuple):
    """What the critic said of a rollout's states, and what came of it: [K, N] each, in rewards times `reward_scale`.

    Rows outside the rollout's `valid` mean nothing.
    """

    value: Tensor
    """V(obs[t]) before the update."""
    target: Tensor
    """advantage + value."""
    advantage: Tensor
    """As `masked_gae` gives it: before any standardisation."""


class Health(NamedTuple):
    """What the host must know before the update; one read."""

    num_final: int
    """Transitions whose final observation is needed."""
    faults: Dict[str, int]
    """Tensor name -> number of bad rows, where there are any."""


def health_tensor(rollout: Rollout, bad: Dict[str, Tensor]) -> Tensor:
    """[1 + len(bad)] int64 on the device: rows that need a final observation, then the bad rows of each name."""
    return torch.stack([rollout.needs_final.sum(), *(rows.sum() for rows in bad.values())])


def bad_rows(rollout: Rollout) -> Dict[str, Tensor]:
    """Name -> [K or K + 1, N] bool, True where something is NaN or infinite. Rewards count where valid, final
    observations where they are read; observations and actions everywhere."""

    def bad(x: Tensor) -> Tensor:
        return (~torch.isfinite(x)).flatten(2).any(2) if x.dim() > 2 else ~torch.isfinite(x)

    found = {f"obs['{name}']": bad(x) for name, x in rollout.obs.items() if x.is_floating_point()}
    found["reward"] = bad(rollout.reward) & rollout.valid
    found["action distribution"] = bad(rollout.params)
    for name, x in (rollout.final_obs or {}).items():
        if x.is_floating_point():
            found[f"final_obs['{name}']"] = bad(x) & rollout.needs_final
    return found


def read_health(rollout: Rollout) -> Health:
    """The first of the two host reads of an iteration."""
    bad = bad_rows(rollout)
    num_final, *counts = health_tensor(rollout, bad).tolist()
    return Health(num_final, {name: count for name, count in zip(bad, counts) if count})


def first_rows(mask: Tensor, count: int) -> Tensor:
    """int64 indices of the `count` True entries of `mask` (flattened); no host read, since `count` is known already."""
    flat = mask.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, count)
    rows = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return rows.scatter_(0, place, torch.arange(flat.shape[0], device=flat.device))[:count]


def raise_non_finite(rollout: Rollout, health: Health, iteration: int) -> None:
    """Name tensor, environments, step and iteration of what is not finite. Slow; only called when something is."""
    found = bad_rows(rollout)
    lines = []
    for name, count in health.faults.items():
        mask = found[name]
        envs = mask.any(0).nonzero().flatten().tolist()
        step = int(mask.any(1).nonzero()[0])
        shown = ", ".join(str(env) for env in envs[:8]) + (", ..." if len(envs) > 8 else "")
        lines.append(f"{name} of env {shown}: {count} rows, first at rollout step {step}")
    raise NonFiniteError(
        f"iteration {iteration}: not finite (NaN or infinite): " + "; ".join(lines) + ". Nothing was learned from "
        "this batch: parameters and the last checkpoint are as they were."
    )


class Collector:
    """Runs the policy in the environment: act, step, store, K times."""

    def __init__(
        self,
        env: VecEnv,
        model: ActorCritic,
        steps: int,
        keep_final_obs: bool,
        seed: int,
        watch: Stopwatch,
        nets: Optional[Nets] = None,
    ) -> None:
        """`nets`: the learner's, which run the model faster; None: the model as it is."""
        self.env, self.model, self.watch = env, model, watch
        self.nets = nets or ModuleNets(model)
        self.rollout = Rollout(steps, env.num_envs, env.spec, model.head.num_params, keep_final_obs, env.device)
        self.generator = make_generator(env.device, seed)
        self.obs: Optional[Obs] = None
        self.brought_up = False
        """Whether a bring-up came before the last rollout: its time is in that iteration's."""

    def start(self) -> None:
        """Reset the environments, bring-up included."""
        self.obs = self.env.reset()
        check_obs("reset()", self.obs, self.env.spec, self.env.num_envs, self.env.device)

    @torch.no_grad()
    def collect(self, steps: Optional[int] = None) -> Rollout:
        """One rollout of `steps` (default: all that the storage holds); its storage is reused by the next."""
        self.brought_up = self.obs is None
        if self.obs is None:
            self.start()
        assert self.obs is not None
        env, head, rollout, obs = self.env, self.model.head, self.rollout.first(steps or self.rollout.steps), self.obs
        rollout.logs = []
        self.nets.refresh()
        scale, noises = head.scale(), head.noise(rollout.params, self.generator).unbind()
        for t in range(rollout.steps):
            with self.watch("policy"):
                row = rollout.put_before(t, obs, *env.read_clocks())
                self.nets.params(obs, out=row.params)
                raw = head.sample(row.params, scale, noises[t])
                row.action.copy_(raw)
                action = head.to_env(raw)
            with self.watch("physics"):
                step = env.step(action)
            rollout.put_after(t, step)
            obs = step.obs
        rollout.finish(obs)
        self.obs = obs
        return rollout

    def state_dict(self) -> Dict[str, Any]:
        obs = None if self.obs is None else {name: x.clone() for name, x in self.obs.items()}
        return {"obs": obs, "generator": generator_state(self.generator)}

    def load_state_dict(self, state: Dict[str, Any], obs_too: bool) -> None:
        """`obs_too`: the environment's state came back as well, so the saved observation still holds."""
        set_generator_state(self.generator, state["generator"])
        if obs_too and state["obs"] is not None:
            self.obs = {name: x.to(self.env.device).clone() for name, x in state["obs"].items()}
