"""skill_chain: a chain of skills, each of which must be learned before the next can be practised.

Our own account of what the toy environments of Bharthulwar, Tao and Su (arXiv 2511.21011) isolate: skill gating, reset
stochasticity and H/K. Their definitions were not public in what we read; this task is not theirs.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State
from rl_stagger.envs.native.render import Canvas

ACTION_SIZE = 4
FEATURE_SIZE = 16
GOOD_MSE = 0.15


class SkillChain(NativeEnv):
    """P stages over H steps; in stage s the right action is a fixed vector in [-1, 1]^4.

    Reward exp(-4 * mse) * (1 + s) / P. A stage is left after H / (2P) good steps (mse < 0.15); besides, at every
    multiple of H / P steps an environment moves on anyway with probability 1 - gating. So gating = 1 lets nobody on
    without the skill, and at gating = 0 time alone suffices. The last stage is not left. Success: the last stage was
    reached. The observation is a fixed random feature vector of the stage.
    """

    capabilities = NativeEnv.capabilities | {Capability.RENDER}

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: int = 200,
        num_stages: int = 20,
        gating: float = 1.0,
        reset_noise: float = 0.0,
        phase_in_obs: bool = False,
        layout_seed: int = 1,
    ) -> None:
        """`reset_noise`: probability that an episode begins in a random stage. `layout_seed` fixes features and right
        actions, so that training and evaluation meet the same task whatever their `seed`. Not every layout is learned
        to the end: in some, a policy parks just outside a stage's right action rather than to go on to a stage whose
        right action it does not know (benchmarks/results/skill_chain.md shows which)."""
        if num_stages < 1 or horizon_steps < 2 * num_stages:
            raise ValueError(f"num_stages={num_stages}: between 1 and horizon_steps / 2 = {horizon_steps // 2}")
        for name, value in (("gating", gating), ("reset_noise", reset_noise)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value}: a share between 0 and 1")
        obs_size = FEATURE_SIZE + int(phase_in_obs)
        spec = EnvSpec({"policy": (obs_size,)}, Box(ACTION_SIZE, -1.0, 1.0), horizon_steps)
        super().__init__(spec, num_envs, device, seed)
        self.num_stages = num_stages
        self.gating, self.reset_noise, self.phase_in_obs = gating, reset_noise, phase_in_obs
        self.steps_to_pass = max(1, horizon_steps // (2 * num_stages))
        self.steps_per_stage = horizon_steps // num_stages
        layout = torch.Generator().manual_seed(layout_seed)
        self.features = torch.randn(num_stages, FEATURE_SIZE, generator=layout).to(self.device)
        self.right_actions = (torch.rand(num_stages, ACTION_SIZE, generator=layout) * 2 - 1).to(self.device)

    def _start(self) -> State:
        random_stage = (self._rand() * self.num_stages).long().clamp(max=self.num_stages - 1)
        noisy = self._rand() < self.reset_noise
        return {"stage": torch.where(noisy, random_stage, 0), "good_steps": torch.zeros_like(random_stage)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        stage = state["stage"]
        mse = (action.clamp(-1.0, 1.0) - self.right_actions[stage]).square().mean(dim=1)
        reward = torch.exp(-4.0 * mse) * (1 + stage) / self.num_stages
        good_steps = state["good_steps"] + (mse < GOOD_MSE)
        passed = good_steps >= self.steps_to_pass
        by_time = (elapsed % self.steps_per_stage == 0) & (self._rand() < 1.0 - self.gating)
        next_stage = (stage + (passed | by_time)).clamp(max=self.num_stages - 1)
        moved = next_stage != stage
        after = {"stage": next_stage, "good_steps": torch.where(moved, 0, good_steps)}
        info = {"success": next_stage == self.num_stages - 1, "log": {"stage": next_stage.float()}}
        return after, reward, torch.zeros_like(moved), info

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        obs = self.features[state["stage"]]
        if self.phase_in_obs:
            assert self.spec.horizon_steps is not None
            obs = torch.cat([obs, (elapsed.float() / self.spec.horizon_steps).unsqueeze(1)], dim=1)
        return {"policy": obs}

    def render(self, env_index: int = 0) -> Tensor:
        """The stages in a row: behind, here, ahead; under them how many of the good steps that this one asks for are
        done. [height, width, 3] uint8."""
        stage, good_steps = (int(self.state[name][env_index]) for name in ("stage", "good_steps"))
        width = 10.0 / self.num_stages
        canvas = Canvas((-0.2, -0.6), (10.2, 1.2), 50.0)
        for s in range(self.num_stages):
            colour = "done" if s < stage else "moving" if s == stage else "line"
            canvas.box((s * width + 0.1 * width, 0.0), ((s + 1) * width - 0.1 * width, 1.0), colour)
        canvas.box((0.0, -0.4), (10.0, -0.2), "line")
        canvas.box((0.0, -0.4), (10.0 * min(1.0, good_steps / self.steps_to_pass), -0.2), "done")
        return canvas.picture()
