"""Isaac Lab's adapter on doubles of its two kinds of environment; test_isaac_lab_real.py runs the real one."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Optional, Tuple

import pytest
import torch
from doubles.isaac_lab_envs import DirectEnv, ManagerEnv
from helpers.toy_envs_runner import small_tree
from torch import Tensor

import rl_stagger as rs
from rl_stagger.config import build_config
from rl_stagger.envs import isaac_lab
from rl_stagger.envs.check import check_env
from rl_stagger.envs.isaac_lab import IsaacLabEnv, column_names
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.run_dir import read_metrics_lines

N, H = 6, 12


@dataclass
class Ranges:
    lin_vel_x: Tuple[float, float] = (-1.0, 1.0)
    heading: Optional[Tuple[float, float]] = None


class Rough(ManagerEnv):
    """With a graded terrain, levels going up by one at every reset, a reward weight and a command's range."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        levels, types = 3, 4
        terrains = {"flat": SimpleNamespace(proportion=0.5), "stairs": SimpleNamespace(proportion=0.5)}
        generator = SimpleNamespace(curriculum=True, sub_terrains=terrains)
        n = self.num_envs
        self.scene.terrain = SimpleNamespace(
            cfg=SimpleNamespace(terrain_generator=generator),
            terrain_levels=torch.zeros(n, dtype=torch.int64),
            terrain_types=torch.arange(n) * types // n,
            terrain_origins=torch.arange(levels * types * 3.0).reshape(levels, types, 3),
            env_origins=torch.zeros(n, 3),
        )
        self.curriculum_manager: Any = SimpleNamespace(compute=self._up, reset=lambda env_ids=None: {})
        self.weight = SimpleNamespace(weight=-1.0)
        self.reward_manager = SimpleNamespace(active_terms=["torque"], get_term_cfg=lambda name: self.weight)
        self.command = SimpleNamespace(cfg=SimpleNamespace(ranges=Ranges()))
        self.command_manager = SimpleNamespace(active_terms=["twist"], get_term=lambda name: self.command)

    def _up(self, env_ids: Tensor) -> None:
        terrain = self.scene.terrain
        terrain.terrain_levels[env_ids] = (terrain.terrain_levels[env_ids] + 1).clamp(max=2)

    def _reset_idx(self, env_ids: Tensor) -> None:
        self.curriculum_manager.compute(env_ids=env_ids)
        super()._reset_idx(env_ids)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    """Builds the adapter around `kind`; `new`: Isaac Lab 3.0 and later, which can give final observations."""

    def build(kind: Any = ManagerEnv, new: bool = True, seed: int = 0, num_envs: int = N, **settings: Any) -> Any:
        final = {"compute_final_obs": False} if new else {}
        cfg = SimpleNamespace(seed=None, decimation=2, sim=SimpleNamespace(dt=0.01), episode_length_s=H * 0.02, **final)

        def start(task_id: str, cfg: Any, stack: ExitStack) -> Any:
            env = kind(num_envs=num_envs, max_episode_length=round(cfg.episode_length_s / 0.02), **settings)
            env.cfg.compute_final_obs = getattr(cfg, "compute_final_obs", False)
            env.common_step_counter = 0
            return env

        monkeypatch.setattr(isaac_lab, "load_cfg", lambda *arguments: cfg)
        monkeypatch.setattr(isaac_lab, "start", start)
        return IsaacLabEnv(num_envs, seed=seed)

    return build


def rows(*on: int) -> Tensor:
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(on)] = True
    return mask


ZERO = torch.zeros(N, 3)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("kind", [ManagerEnv, DirectEnv, Rough])
def test_the_contract_is_kept(make: Any, kind: Any, new: bool) -> None:
    report = check_env(make(kind, new, lengths=[0, 5, 0, 0, 7, 0]), make=lambda seed: make(kind, new, seed))
    assert not report.errors, str(report)
    # Noise comes from one stream, which a partial reset moves on: the checker cannot tell.
    assert {warning.check for warning in report.warnings} <= {"partial_reset"}, str(report)


def test_final_observations_are_those_before_the_reset(make: Any) -> None:
    env = make(lengths=[0, 3, 0, 0, 0, 0])
    env.reset()
    for t in range(1, H + 1):
        step = env.step(ZERO)
        assert step.final_obs is not None
        want = [t] * N
        want[1] = (t - 1) % 3 + 1
        assert step.final_obs["policy"][:, 0].tolist() == want  # steps in which nobody ends have no stale one
        assert step.terminated.tolist() == [i == 1 and t % 3 == 0 for i in range(N)]
    assert step.truncated.tolist() == [i != 1 for i in range(N)]
    assert step.obs["policy"][0, 0] == 0


def test_older_versions_have_no_final_observation_and_say_so(make: Any, tmp_path: Any) -> None:
    env = make(new=False)
    env.reset()
    assert env.step(ZERO).final_obs is None
    quiet = small_tree(tmp_path / "run", rollout_steps=4, iterations=3)
    runner = rs.Runner(make(new=False), build_config(quiet))
    assert runner.learn().summary["status"] == "finished"
    assert any("pre_step_value" in note for note in runner.notes)


def test_a_finite_horizon_is_a_true_end(make: Any) -> None:
    env = make(finite=True)
    env.reset()
    for _ in range(H):
        step = env.step(ZERO)
    assert step.terminated.all()
    assert not step.truncated.any()


@pytest.mark.parametrize("kind", [ManagerEnv, DirectEnv])
def test_a_partial_reset_leaves_the_others_observation_alone(make: Any, kind: Any) -> None:
    env = make(kind)
    env.reset()
    before = env.step(ZERO).obs["policy"]
    after = env.reset(rows(2))["policy"]
    assert torch.equal(after[~rows(2)], before[~rows(2)]), "no new noise"
    assert after[2, 0] == 0
    assert env.elapsed_steps.tolist() == [1, 1, 0, 1, 1, 1]


def test_observation_histories_take_partial_resets_away(make: Any) -> None:
    class WithHistory(ManagerEnv):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.observation_manager._group_obs_term_history_buffer = {"policy": {"joints": object()}}

    env = make(WithHistory)
    env.reset()
    with pytest.raises(CapabilityError, match="partial_reset"):
        env.reset(rows(1))


def test_the_log_counts_in_the_step_of_a_reset_only(make: Any) -> None:
    env = make()
    env.reset()
    logs = [env.step(ZERO).info["log"] for _ in range(H + 1)]
    assert [bool(log) for log in logs] == [t == H - 1 for t in range(H + 1)]


def test_curricula_move_at_true_ends_only_and_stand_still_in_evaluation(make: Any) -> None:
    env = make(Rough)
    levels = env._env.scene.terrain.terrain_levels
    env.reset()
    env.reset(rows(0, 1))
    assert levels.tolist() == [0] * N
    env.set_elapsed_steps(torch.full((N,), H - 1), rows(2))
    assert env.step(ZERO).truncated[2]
    assert levels.tolist() == [0, 0, 1, 0, 0, 0]
    env.set_evaluation(True)
    env.set_elapsed_steps(torch.full((N,), H - 1))
    assert env.step(ZERO).truncated.all()
    assert levels.tolist() == [0, 0, 1, 0, 0, 0]


def test_difficulty_and_terrain_types(make: Any) -> None:
    env = make(Rough)
    env.reset()
    env.set_difficulty(2)
    terrain = env._env.scene.terrain
    assert terrain.terrain_levels.tolist() == [2] * N
    assert terrain.env_origins[1].tolist() == terrain.terrain_origins[2, 1].tolist()
    cases = {name: mask.tolist() for name, mask in env.evaluation_cases().items()}
    assert cases["flat"] == [True, True, False, False, True, True]  # columns 0 1 2 3 0 1, of which 0 and 1 are flat
    assert cases["stairs"] == [not flat for flat in cases["flat"]]
    with pytest.raises(ConfigError, match="difficulty=3: this task has levels 0 to 2"):
        env.set_difficulty(3)
    with pytest.raises(ConfigError, match="no graded terrain"):
        make(ManagerEnv).set_difficulty(0)


def test_columns_of_a_terrain_follow_its_proportions() -> None:
    def generator(**shares: float) -> Any:
        return SimpleNamespace(sub_terrains={name: SimpleNamespace(proportion=x) for name, x in shares.items()})

    assert column_names(generator(a=1, b=1, c=2), 8) == ("a", "a", "b", "b", "c", "c", "c", "c")
    assert column_names(generator(a=0.3, b=0.7), 3) == ("a", "b", "b")  # 0, 1/3 > .3, 2/3


def test_what_curricula_have_moved_is_saved_and_episodes_begin_anew(make: Any) -> None:
    env = make(Rough)
    env.reset()
    env._env.scene.terrain.terrain_levels.copy_(torch.tensor([2, 0, 1, 2, 1, 0]))
    env._env.weight.weight = -5.0
    env._env.command.cfg.ranges.lin_vel_x = (-2.0, 2.0)
    env._env.common_step_counter = 77
    saved = env.state_dict()
    torch.save(saved, "/dev/null")
    resumed = make(Rough, seed=3)
    resumed.reset()
    resumed.step(ZERO)
    resumed.load_state_dict(saved)
    assert resumed._env.scene.terrain.terrain_levels.tolist() == [2, 0, 1, 2, 1, 0]
    assert (resumed._env.weight.weight, resumed._env.common_step_counter) == (-5.0, 77)
    assert resumed._env.command.cfg.ranges.lin_vel_x == (-2.0, 2.0)
    step = resumed.step(ZERO)
    assert not step.valid.any()
    assert step.info["reset"].all()
    assert resumed.step(ZERO).valid.all()
    judge = make(Rough, num_envs=3)
    judge.load_curriculum(saved)
    assert judge._env.scene.terrain.terrain_levels.tolist() == [2, 1, 1]


def test_after_a_resume_no_episode_is_longer_than_the_time_limit(make: Any, tmp_path: Path) -> None:
    """Episodes begin anew, so what had been counted of the old ones is not added to the new."""
    run, env = tmp_path / "run", make(Rough)
    env._env.scene.terrain.terrain_levels.copy_(torch.tensor([2, 0, 1, 2, 1, 0]))
    rs.Runner(env, build_config(small_tree(run, "synchronous", rollout_steps=5, iterations=2))).learn()
    env = make(Rough)
    more = small_tree(run, "synchronous", rollout_steps=5, iterations=6, resume="latest")
    runner = rs.Runner(env, build_config(more))
    runner.learn()
    # One end of an episode since, at which all went up by one, up to 2
    assert env._env.scene.terrain.terrain_levels.tolist() == [2, 1, 2, 2, 2, 1]
    assert any("episodes start anew; its curricula go on" in note for note in runner.notes)
    lengths = [line["episode/length_mean"] for line in read_metrics_lines(run)]
    assert [length for length in lengths if length is not None] == [float(H)], "not 10 steps more"


@pytest.mark.parametrize("reset", ["staggered", "random_clock", "synchronous"])
def test_it_trains(make: Any, reset: str, tmp_path: Any) -> None:
    run = build_config({**small_tree(tmp_path / "run", rollout_steps=4, iterations=4), **rule(reset)})
    assert rs.Runner(make(), run).learn().summary["status"] == "finished"


def rule(reset: str) -> Dict[str, Any]:
    from rl_stagger.overrides import compose

    return {"reset": compose([f"reset={reset}"])["reset"]}


@pytest.mark.parametrize(
    "look, match",
    [
        (lambda env: {"policy": {"joints": env.count}}, "concatenate_terms=False"),
        (lambda env: {"policy": torch.zeros(N, 8, 8, 3)}, "pictures"),
    ],
)
def test_observations_that_no_policy_reads_are_refused(make: Any, look: Any, match: str) -> None:
    class Odd(ManagerEnv):
        def look(self) -> Any:
            return look(self)

    with pytest.raises(ConfigError, match=match):
        make(Odd)


def test_without_isaac_lab_the_error_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(registry={}))
    monkeypatch.setattr(isaac_lab.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install isaaclab==3\.0\.0, which needs Python 3\.12 and torch 2\.11"):
        rs.make_env("isaaclab", 2, task_id="Isaac-Cartpole")
