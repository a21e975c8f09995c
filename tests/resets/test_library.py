"""Recorded states by phase: bounded, the oldest replaced, what was recorded comes back."""

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv, small_tree

import rl_stagger as rs
from rl_stagger.config import build_config
from rl_stagger.errors import CheckpointError, ConfigError
from rl_stagger.resets.library import StateLibrary
from rl_stagger.run_dir import read_metrics_lines

CPU = torch.device("cpu")


def library(num_bins=3, horizon=12, capacity_bytes=10**6, most=8):
    return StateLibrary(num_bins, horizon, capacity_bytes, most)


def state(phases, mark=0):
    """A state that tells its phase and when it was recorded."""
    phases = torch.tensor(phases)
    return {"x": torch.stack([phases, torch.full_like(phases, mark)], 1).float(), "elapsed_steps": phases}, phases


def record(lib, phases, mark=0, mask=None):
    values, phase = state(phases, mark)
    mask = torch.ones(len(phases), dtype=torch.bool) if mask is None else torch.tensor(mask)
    lib.record(values, phase, mask, torch.linspace(0, 0.9, len(phases)))


def test_what_comes_back_is_of_the_bin_asked_for():
    lib = library()
    assert lib.filled is None
    record(lib, [1, 5, 6, 11])
    # 12 steps in 3 bins: 0..3, 4..7, 8..11.
    assert lib.filled.tolist() == [1, 2, 1]
    bins = torch.tensor([0, 1, 1, 2, 2])
    drawn, phase = lib.draw(bins, torch.tensor([0.0, 0.0, 0.99, 0.3, 0.7]))
    assert phase.tolist() == [1, 5, 6, 11, 11]
    assert drawn["x"][:, 0].tolist() == [1, 5, 6, 11, 11], "the state of that phase"
    assert drawn["elapsed_steps"].tolist() == [1, 5, 6, 11, 11]


def test_rows_outside_the_mask_are_not_kept():
    lib = library()
    record(lib, [1, 2, 3], mask=[False, True, False])
    assert lib.filled.tolist() == [1, 0, 0]
    assert lib.draw(torch.tensor([0]), torch.tensor([0.9]))[1].tolist() == [2]


def test_the_oldest_are_replaced():
    lib = library(most=4)
    for mark in range(7):  # a quarter of 4 places a time: one state
        record(lib, [mark % 4, 2, 2], mark)
    assert lib.filled.tolist() == [4, 0, 0]
    marks = lib.draw(torch.zeros(40, dtype=torch.int64), torch.linspace(0, 0.99, 40))[0]["x"][:, 1]
    assert sorted(set(marks.tolist())) == [3, 4, 5, 6]


def test_capacity_is_in_bytes():
    # A row: 2 float32 and one int64, 16 bytes. 3 bins of 5 places: 240 bytes.
    lib = library(capacity_bytes=255, most=100)
    record(lib, [1, 2, 3])
    assert lib.per_bin == 5
    assert lib.bytes == (3 * 5 + 1) * 16, "one row more, for what is not kept"
    with pytest.raises(ConfigError, match=r"reset\.library\.mib=.*3 phase bins takes 4\.58e-05 MiB; at least"):
        record(library(capacity_bytes=47), [1, 2, 3])


def test_a_saved_library_is_the_same_and_stands_still():
    lib = library()
    record(lib, [1, 5, 9], 1)
    saved = lib.state_dict()
    again = library()
    again.load_state_dict(saved, CPU)
    record(lib, [1, 5, 9], 2)
    bins, draw = torch.tensor([0, 1, 2]), torch.tensor([0.9, 0.9, 0.9])
    assert again.draw(bins, draw)[0]["x"][:, 1].tolist() == [1, 1, 1]
    record(again, [1, 5, 9], 2)
    for name, value in lib.state_dict()["states"].items():
        assert torch.equal(again.state_dict()["states"][name], value)
    assert library().state_dict() == {}
    with pytest.raises(ValueError, match="it has 3 phase bins, this run has 4"):
        library(num_bins=4).load_state_dict(saved, CPU)
    with pytest.raises(ValueError, match="its states are of H=12, this task has H=24"):
        library(horizon=24).load_state_dict(saved, CPU)


def test_states_of_the_same_task_with_other_settings_are_refused(tmp_path):
    def run(name, stages, **reset):
        tree = small_tree(tmp_path / name, "snapshot", "skill_chain", iterations=4)
        tree["task"]["settings"] = {"num_stages": stages, "horizon_steps": 12}
        tree["reset"].update(reset)
        config = build_config(tree)
        return rs.Runner(rs.make_env("skill_chain", 6, **config.task.settings), config)

    run("first", 6).learn()
    with pytest.raises(ConfigError, match="of another task, num_stages=6 there and 2 here"):
        run("second", 2, library={"path": str(tmp_path / "first")})
    run("third", 6, library={"path": str(tmp_path / "first")}).learn()
    (tmp_path / "first").rename(tmp_path / "gone")
    # Its own checkpoint holds the states: the path is not needed again.
    tree = small_tree(tmp_path / "third", "snapshot", "skill_chain", iterations=6, resume=str(tmp_path / "third"))
    tree["task"]["settings"] = {"num_stages": 6, "horizon_steps": 12}
    tree["reset"]["library"] = {"path": str(tmp_path / "first")}
    assert rs.Runner(rs.make_env("skill_chain", 6, num_stages=6, horizon_steps=12), build_config(tree)).learn()


def test_states_of_another_task_are_refused():
    lib = library()
    record(lib, [1, 5, 9])
    values, phase = state([1, 5, 9])
    other = {"pose": values["x"], "elapsed_steps": phase}
    with pytest.raises(
        ConfigError, match=r"of another task: elapsed_steps \[\], x \[2\] there, elapsed_steps \[\], pose \[2\]"
    ):
        lib.record(other, phase, torch.ones(3, dtype=torch.bool), torch.zeros(3))


def test_a_library_comes_from_a_run_of_the_same_task(tmp_path):
    rs.Runner(CounterEnv(6), build_config(small_tree(tmp_path / "first", "snapshot", iterations=4))).learn()
    path = {"library": {"path": str(tmp_path / "first")}}
    lines = []
    for name, env in (("second", CounterEnv(6)), ("other", rs.make_env("pendulum", 6, horizon_steps=12))):
        tree = small_tree(tmp_path / name, "snapshot", iterations=2)
        tree["reset"].update(path)
        if name == "other":
            with pytest.raises(ConfigError, match="of another task, name=toy there and pendulum here"):
                rs.Runner(env, build_config(tree))
        else:
            rs.Runner(env, build_config(tree)).learn()
            lines = read_metrics_lines(tmp_path / name)
    assert lines[0]["batch/coverage"] > 0.9, "spread in the first batch"
    rs.Runner(CounterEnv(6), build_config(small_tree(tmp_path / "bare", iterations=1))).learn()
    for where, match in (("bare", "that run recorded no states"), ("nowhere", "nowhere")):
        tree = small_tree(tmp_path / "x", "snapshot")
        tree["reset"]["library"] = {"path": str(tmp_path / where)}
        with pytest.raises((ConfigError, CheckpointError), match=match):
            rs.Runner(CounterEnv(6), build_config(tree))
    tree = small_tree(tmp_path / "x", "snapshot", rollout_steps=2)
    tree["reset"]["library"] = {"path": str(tmp_path / "first")}
    with pytest.raises(ConfigError, match="it has 3 phase bins, this run has 6; give both the same H, K"):
        rs.Runner(CounterEnv(6), build_config(tree))
