"""ManiSkill's simulator as far as a reset rule meets it, and its vector environment where mani_skill is not installed.

Made after the published source of mani_skill 3.0.1 (envs/sapien_env.py, utils/registration.py,
vector/wrappers/gymnasium.py), traps included: the clock is a read-only property of int32 that a step counts up in
place; infos hand out the clock itself; a partial reset takes indices, looks at everybody (new noise for every row) and
cannot go with a reconfiguration; with metrics, the clock is taken for the episode's length; final observations are
only there in steps in which somebody ended. No physics.

`vector_env` uses the real ManiSkillVectorEnv where there is one.
"""

import sys
import types
import warnings

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv


class BaseEnv(gym.Env):
    """Observation [N, 2]: steps since the reset, which no clock can fake, and noise below 1/2. Reward: those steps.
    Row i succeeds, and so terminates, at `lengths[i]` steps (0: never)."""

    def __init__(self, num_envs, lengths=(), reconfiguration_freq=0, nested=False, two_robots=False):
        self.num_envs, self.device, self.reconfiguration_freq = num_envs, torch.device("cpu"), reconfiguration_freq
        self.lengths = torch.tensor(list(lengths) or [0] * num_envs)
        self.nested, self.count, self.seeds, self.actions = nested, torch.zeros(num_envs), [], []
        self._elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self.row_resets = 0
        agent = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.single_action_space = spaces.Dict({"left": agent, "right": agent}) if two_robots else agent
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (num_envs, 2), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs, 2), np.float32)

    @property
    def elapsed_steps(self):
        return self._elapsed_steps

    def get_obs(self):
        seen = torch.stack([self.count, 0.5 * torch.rand(self.num_envs)], dim=1)
        if self.nested:
            return {"agent": {"qpos": seen}, "camera": {"rgb": (seen[:, :1] * 2).to(torch.uint8)}}
        return seen

    def get_info(self):
        return {"elapsed_steps": self.elapsed_steps, "success": self.count == self.lengths}

    def reset(self, seed=None, options=None):
        options = options or {}
        self.seeds.append(seed)
        reconfigure = options.get("reconfigure", False) or self.reconfiguration_freq != 0
        ids = options.get("env_idx", torch.arange(self.num_envs))
        assert len(ids) > 0, "a partial reset of nobody"
        if len(ids) != self.num_envs and reconfigure:
            raise RuntimeError("Cannot do a partial reset and reconfigure the environment.")
        self.row_resets += len(ids)
        self.count[ids] = 0
        self._elapsed_steps[ids] = 0
        return self.get_obs(), {**self.get_info(), "reconfigure": reconfigure}

    def step(self, action):
        self.actions.append(action)
        self.count += 1
        self._elapsed_steps += 1
        info = self.get_info()
        nobody = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.get_obs(), self.count.clone(), info["success"].clone(), nobody, info


class TimeLimitWrapper(gym.Wrapper):
    """mani_skill's own: the limit is on the environment's clock."""

    def __init__(self, env, max_episode_steps):
        super().__init__(env)
        self._max_episode_steps = max_episode_steps

    def step(self, action):
        obs, reward, terminated, _, info = self.env.step(action)
        return obs, reward, terminated, self.unwrapped.elapsed_steps >= self._max_episode_steps, info


class ManiSkillVectorEnv(VectorEnv):
    """Resets in the same step."""

    def __init__(self, env, auto_reset=True, ignore_terminations=False, record_metrics=False):
        self._env = env
        self.num_envs, self.spec = self.base_env.num_envs, env.spec
        self.auto_reset, self.ignore_terminations, self.record_metrics = auto_reset, ignore_terminations, record_metrics
        for name in ("single_observation_space", "single_action_space", "action_space", "observation_space"):
            setattr(self, name, env.get_wrapper_attr(name))
        self.metadata = {**env.metadata, "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        if not ignore_terminations and auto_reset:
            assert self.base_env.reconfiguration_freq == 0 or self.num_envs == 1
        self.success_once = torch.zeros(self.num_envs, dtype=torch.bool)
        self.returns = torch.zeros(self.num_envs)

    @property
    def base_env(self):
        return self._env.unwrapped

    @property
    def unwrapped(self):
        return self.base_env

    @property
    def device(self):
        return self.base_env.device

    def reset(self, *, seed=None, options=None):
        obs, info = self._env.reset(seed=seed, options=options)
        rows = options["env_idx"] if options and "env_idx" in options else slice(None)
        self.success_once[rows] = False
        self.returns[rows] = 0
        return obs, info

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self._env.step(actions)
        if self.ignore_terminations:
            terminated[:] = False
        if self.record_metrics:
            self.returns += reward
            self.success_once = self.success_once | infos["success"]
            length = self.base_env.elapsed_steps.clone()
            returns = self.returns.clone()
            infos["episode"] = {"success_once": self.success_once.clone(), "return": returns, "episode_len": length}
            infos["episode"]["reward"] = returns / length
        done = terminated | truncated
        if done.any() and self.auto_reset:
            final_obs, final_info = _clone(obs), _clone(infos)
            obs, infos = self.reset(options={"env_idx": torch.arange(self.num_envs)[done]})
            infos["final_observation"], infos["final_info"] = final_obs, final_info
            infos["_final_info"] = infos["_final_observation"] = infos["_elapsed_steps"] = done
        return obs, reward, terminated, truncated, infos

    def close_extras(self, **kwargs):
        self._env.close()

    def call(self, name, *args, **kwargs):
        return getattr(self._env, name)(*args, **kwargs)


ManiSkillVectorEnv.__module__ = "mani_skill.vector.wrappers.gymnasium"


def _clone(tree):
    if isinstance(tree, dict):
        return {key: _clone(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def vector_env_class():
    """The real class, or the double, which then stands in its place for whoever imports it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own, at the first import
            from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv as Real

        return Real
    except ImportError:
        for name in ("mani_skill", "mani_skill.vector", "mani_skill.vector.wrappers"):
            sys.modules.setdefault(name, types.ModuleType(name))
        module = types.ModuleType("mani_skill.vector.wrappers.gymnasium")
        module.ManiSkillVectorEnv = ManiSkillVectorEnv
        sys.modules[module.__name__] = module
        return ManiSkillVectorEnv


def vector_env(
    num_envs=6, max_episode_steps=12, lengths=(), reconfiguration_freq=0, nested=False, two_robots=False, **more
):
    base = BaseEnv(num_envs, lengths, reconfiguration_freq, nested, two_robots)
    return vector_env_class()(TimeLimitWrapper(base, max_episode_steps), **more)
