"""Isaac Lab's rsl_rl wrapper around its environments.

Made after the published source (isaaclab_rl/rsl_rl/vecenv_wrapper.py), traps included: the wrapper has no reset();
`time_outs` is only in extras, and not there at all for finite horizons.
"""

import torch
from doubles.isaac_lab_envs import DirectEnv, ManagerEnv
from rsl_rl.env import VecEnv
from tensordict import TensorDict

__all__ = ["DirectEnv", "ManagerEnv", "RslRlVecEnvWrapper"]


class RslRlVecEnvWrapper(VecEnv):
    """The outermost wrapper, which is what rsl_rl is given."""

    def __init__(self, env, clip_actions=None):
        self.env, self.clip_actions = env, clip_actions
        self.num_envs, self.device, self.max_episode_length = env.num_envs, env.device, env.max_episode_length
        managed = hasattr(env, "action_manager")
        self.num_actions = env.action_manager.total_action_dim if managed else env.single_action_space.shape[0]
        self.env.reset()

    unwrapped = property(lambda self: self.env.unwrapped)
    cfg = property(lambda self: self.unwrapped.cfg)

    @property
    def episode_length_buf(self):
        return self.unwrapped.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, value):
        self.unwrapped.episode_length_buf = value

    def get_observations(self):
        env = self.unwrapped
        obs = env.observation_manager.compute() if hasattr(env, "observation_manager") else env._get_observations()
        return TensorDict(obs, batch_size=[self.num_envs])

    def step(self, actions):
        if self.clip_actions is not None:
            actions = torch.clamp(actions, -self.clip_actions, self.clip_actions)
        obs, reward, terminated, truncated, extras = self.env.step(actions)
        if not self.unwrapped.cfg.is_finite_horizon:
            extras["time_outs"] = truncated
        return TensorDict(obs, batch_size=[self.num_envs]), reward, (terminated | truncated).long(), extras

    def close(self):
        return self.env.close()


RslRlVecEnvWrapper.__module__ = "isaaclab_rl.rsl_rl.vecenv_wrapper"
