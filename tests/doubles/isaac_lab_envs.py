"""Isaac Lab's two kinds of environment, as far as a reset rule meets them.

Made after the published source (isaaclab/envs), traps included: looking draws new noise for every row; reward and
masks are buffers that the next step overwrites; the observation of an ended episode is lost unless `compute_final_obs`
asks for it, and is computed, as the log is, only in steps in which somebody resets: otherwise the old ones stay in
extras; direct environments reset rows only by `_reset_idx`; curricula move at every reset. No physics.
"""

from types import SimpleNamespace

import torch


class ManagerEnv:
    """State: steps since the reset (`count`), which no clock can fake. Observation group "policy" [N, 2]: count and
    noise below 1/2. Row i terminates at `lengths[i]` steps (0: never)."""

    def __init__(self, num_envs=6, max_episode_length=12, lengths=(), finite=False, final_obs=False):
        self.num_envs, self.device, self.max_episode_length = num_envs, "cpu", max_episode_length
        self.cfg = SimpleNamespace(is_finite_horizon=finite, compute_final_obs=final_obs)
        self.lengths = torch.tensor(list(lengths) or [0] * num_envs)
        self.count = torch.full((num_envs,), -1.0)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.reward_buf = torch.zeros(num_envs)
        self.reset_terminated = torch.zeros(num_envs, dtype=torch.bool)
        self.reset_time_outs = torch.zeros(num_envs, dtype=torch.bool)
        self.extras = {}
        self.action_manager = SimpleNamespace(total_action_dim=3)
        self.observation_manager = SimpleNamespace(compute=self.look)
        self.scene = SimpleNamespace()
        self.row_resets = 0

    unwrapped = property(lambda self: self)

    def look(self):
        return {"policy": torch.stack([self.count, 0.5 * torch.rand(self.num_envs)], dim=1)}

    def reset(self, seed=None, env_ids=None, options=None):
        self._reset_idx(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self.look(), self.extras

    def _reset_idx(self, env_ids):
        self.row_resets += len(env_ids)
        self.count[env_ids] = 0
        self.episode_length_buf[env_ids] = 0
        self.extras["log"] = {"Episode_Reward/alive": torch.tensor(1.0)}

    def step(self, action):
        assert action.shape == (self.num_envs, 3)
        assert (self.count >= 0).all(), "stepped before the first reset"
        self.count += 1
        self.episode_length_buf += 1
        self.reset_terminated[:] = self.count == self.lengths
        self.reset_time_outs[:] = self.episode_length_buf >= self.max_episode_length
        self.reward_buf[:] = self.count
        ids = (self.reset_terminated | self.reset_time_outs).nonzero().squeeze(-1)
        if len(ids) > 0:
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = self.look()
            self._reset_idx(ids)
        return self.look(), self.reward_buf, self.reset_terminated, self.reset_time_outs, self.extras

    def close(self):
        self.closed = True


class DirectEnv(ManagerEnv):
    """No managers; `reset` resets everything; a partial reset reaches the simulator only after write and forward."""

    def __init__(self, **settings):
        super().__init__(**settings)
        del self.action_manager, self.observation_manager
        self.single_action_space = SimpleNamespace(shape=(3,))
        self.written = 0
        self.scene = SimpleNamespace(write_data_to_sim=self.write)
        self.sim = SimpleNamespace(forward=self.write)

    def write(self):
        self.written += 1

    def reset(self, seed=None, options=None):
        return super().reset(seed, None, options)

    def _get_observations(self):
        return self.look()
