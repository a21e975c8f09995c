"""The runner from outside: what a run leaves, how it goes on after a stop, and how it stops when something is wrong."""

import dataclasses
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from helpers.toy_envs_runner import RESETS, CounterEnv, PlainEnv, PoisonedEnv, SignalEnv, small_tree

import rl_stagger as rs
from rl_stagger.checkpoint import list_checkpoints, load_checkpoint
from rl_stagger.config import build_config, to_tree
from rl_stagger.envs.base import Capability
from rl_stagger.errors import CheckpointError, ConfigError
from rl_stagger.evaluate import EvaluateConfig, evaluate_run
from rl_stagger.run_dir import read_metrics_lines

REPO = Path(__file__).resolve().parents[1]
NOT_REPEATED = ("time/", "speed/")


def small_config(run_dir, **settings):
    return build_config(small_tree(run_dir, **settings))


def native(config, seed=None):
    seed = config.seed if seed is None else seed
    return rs.make_env(config.task.name, config.num_envs, config.device, seed, **config.task.settings)


def train(env, config):
    return rs.Runner(env, config).learn()


def lines_of(run_dir):
    """The metrics lines without what no run repeats."""
    kept = []
    for line in read_metrics_lines(Path(run_dir)):
        kept.append({key: value for key, value in line.items() if not key.startswith(NOT_REPEATED)})
    return kept


def checkpoint_at(run_dir, iteration):
    return load_checkpoint(Path(run_dir) / "checkpoints" / f"iter_{iteration:07d}.pt")


def differences(a, b, path=""):
    """Paths at which two trees differ, to the last bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{path}/{key}" for key in a.keys() ^ b.keys()]
        return found + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        return [] if same and torch.equal(a.isnan(), b.isnan()) else [path]
    return [] if a == b else [path]


def whole_state(run_dir, iteration):
    state = checkpoint_at(run_dir, iteration)
    return {key: value for key, value in state.items() if key not in ("config", "wall_s")}


def parameters_of(state):
    return {name: value for name, value in state["model"].items() if value.is_floating_point()}


# -- resume is bitwise ----------------------------------------------------------------------------------------------
RESUMED_TASKS = {
    "skill_chain": {
        "task": {
            "name": "skill_chain",
            "settings": {"horizon_steps": 12, "num_stages": 4, "reset_noise": 0.5, "gating": 0.5},
        }
    },
    "stage_gridworld": {
        "task": {
            "name": "stage_gridworld",
            "settings": {"horizon_steps": 14, "num_rooms": 2, "room_size": 2, "reset_noise": 0.5},
        },
        "model": {"normalize_value": True},
    },
    "legged_bench": {
        "task": {
            "name": "legged_bench",
            "settings": {"horizon_steps": 13, "termination_probability": 0.1, "critic_obs": True},
        },
        "algorithm": {"kl_measure": "epoch"},
    },
}
RESUMED = list(itertools.product(sorted(RESUMED_TASKS), sorted(RESETS)))

GO_ON = """
import json, sys, torch
import rl_stagger as rs
from rl_stagger.config import build_config
for tree in json.load(open(sys.argv[1])):
    config = build_config(tree)
    torch.rand(7)                                 # whatever else this process drew
    env = rs.make_env(config.task.name, config.num_envs, config.device, config.seed + 7, **config.task.settings)
    rs.Runner(env, config).learn()
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """(task, reset) -> (folder of 4 iterations at once, folder of 2 + a new process + 2)."""
    root = tmp_path_factory.mktemp("resumed")
    folders, rest = {}, []
    for task, reset in RESUMED:
        settings = {"reset": reset, "seed": 3, **RESUMED_TASKS[task]}
        straight, halves = root / f"{task}_{reset}_4", root / f"{task}_{reset}_2_2"
        config = small_config(straight, iterations=4, **settings)
        train(native(config), config)
        config = small_config(halves, iterations=2, **settings)
        train(native(config), config)
        rest.append(small_tree(halves, iterations=4, resume=str(halves), **settings))
        folders[task, reset] = (straight, halves)
    (root / "rest.json").write_text(json.dumps(rest))
    run = subprocess.run(
        [sys.executable, "-c", GO_ON, str(root / "rest.json")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return folders


@pytest.mark.parametrize("task, reset", RESUMED)
def test_four_iterations_are_two_and_a_new_process_and_two(resumed, task, reset):
    straight, halves = resumed[task, reset]
    assert differences(whole_state(straight, 4), whole_state(halves, 4)) == []
    assert lines_of(straight) == lines_of(halves)
    assert [line["iteration"] for line in lines_of(halves)] == [1, 2, 3, 4], "totals go on, nothing is told twice"
    assert [line["steps/total"] for line in lines_of(halves)] == [24, 48, 72, 96]
    moved = differences(parameters_of(checkpoint_at(halves, 2)), parameters_of(checkpoint_at(halves, 4)))
    assert moved, "the second half has learned something"


def test_the_resumed_runs_were_worth_comparing(resumed):
    rates, ended, warmup, frozen = [], 0, set(), 0.0
    for (_, reset), (straight, halves) in resumed.items():
        rates.append(float(checkpoint_at(halves, 2)["learner"]["rate"]))
        lines = lines_of(straight)
        ended += sum(line["episode/count"] + line["episode/partial_count"] for line in lines[:2])
        warmup.add((reset, lines[-1]["steps/warmup"] > 0))
        frozen += sum(1 - line["batch/valid_share"] for line in lines[2:])
    assert any(rate != pytest.approx(1e-3) for rate in rates), "some rate was adapted before the stop"
    assert ended > 0
    free = {"synchronous", "random_clock", "snapshot"}
    assert warmup == {(reset, reset not in free) for reset in RESETS}
    assert frozen > 0, "somebody waited at a gate after the stop"


def test_the_wall_clock_and_the_summary_go_on(resumed):
    straight, halves = resumed["skill_chain", "staggered"]
    walls = [line["time/wall_s"] for line in read_metrics_lines(halves)]
    assert walls == sorted(walls)
    assert walls[0] > 0
    ours, theirs = (json.loads((d / "summary.json").read_text()) for d in (halves, straight))
    for name in ("status", "iterations", "steps_total", "steps_warmup", "final_return", "best_return"):
        assert ours[name] == theirs[name]


def test_a_linear_rate_goes_on_after_an_interruption(tmp_path):
    linear = {"algorithm": {"schedule": "linear"}, "iterations": 4}
    train(CounterEnv(6), small_config(tmp_path / "straight", **linear))
    # After 8 steps of warm-up and 4 of iteration 1, this is the second of iteration 2.
    stopped = train(SignalEnv(6, signal.SIGTERM, [8 + 6]), small_config(tmp_path / "halves", **linear))
    assert (stopped.summary["status"], stopped.summary["iterations"]) == ("interrupted", 2)
    finished = train(CounterEnv(6), small_config(tmp_path / "halves", resume=str(tmp_path / "halves"), **linear))
    assert finished.summary["status"] == "finished"
    assert lines_of(tmp_path / "straight") == lines_of(tmp_path / "halves")
    # From 1e-3 in the first iteration to 0 in the fourth and last.
    rates = [line["optim/lr"] for line in lines_of(tmp_path / "halves")]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3, 0.0], abs=1e-9)


def test_a_simulator_that_draws_from_global_generators_goes_on_bitwise(tmp_path):
    class Drawing(CounterEnv):
        def step(self, action):
            step = super().step(action)
            step.reward += torch.rand(self.num_envs) + random.random() + float(numpy.random.random())  # noqa: NPY002
            return step

    train(Drawing(6), small_config(tmp_path / "straight", iterations=4))
    train(Drawing(6), small_config(tmp_path / "halves"))
    train(Drawing(6), small_config(tmp_path / "halves", iterations=4, resume=str(tmp_path / "halves")))
    assert differences(whole_state(tmp_path / "straight", 4), whole_state(tmp_path / "halves", 4)) == []
    assert lines_of(tmp_path / "straight") == lines_of(tmp_path / "halves")


def test_another_learning_rate_may_be_asked_for_on_resume(tmp_path):
    train(CounterEnv(6), small_config(tmp_path / "a"))
    kept = rs.Runner(CounterEnv(6), small_config(tmp_path / "a", resume=str(tmp_path / "a"), iterations=3))
    assert float(kept.learner.rate) == float(checkpoint_at(tmp_path / "a", 2)["learner"]["rate"])
    asked = small_config(tmp_path / "a", resume=str(tmp_path / "a"), algorithm={"learning_rate": 5e-4})
    assert float(rs.Runner(CounterEnv(6), asked).learner.rate) == pytest.approx(5e-4)


def test_resume_into_another_folder_leaves_the_first_as_it_was(tmp_path):
    train(CounterEnv(6), small_config(tmp_path / "a"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
    result = train(CounterEnv(6), small_config(tmp_path / "b", resume=str(tmp_path / "a"), iterations=3))
    assert result.run_dir == tmp_path / "b"
    assert [line["iteration"] for line in lines_of(tmp_path / "b")] == [1, 2, 3]
    assert lines_of(tmp_path / "b")[:2] == lines_of(tmp_path / "a")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}


def test_going_back_to_an_earlier_checkpoint_keeps_what_is_saved_from_then_on(tmp_path):
    often = {"checkpoint": {"every_iters": 1, "keep_last": 3}}
    train(CounterEnv(6), small_config(tmp_path / "a", iterations=6, **often))
    folder = tmp_path / "a" / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == [f"iter_{i:07d}.pt" for i in (4, 5, 6)]
    back = folder / "iter_0000004.pt"
    config = small_config(tmp_path / "a", resume=str(back), iterations=5, algorithm={"clip": 0.1}, **often)
    train(CounterEnv(6), config)
    assert [line["iteration"] for line in lines_of(tmp_path / "a")] == [1, 2, 3, 4, 5]
    runner = rs.Runner(CounterEnv(6), small_config(tmp_path / "a", resume=str(tmp_path / "a"), iterations=6, **often))
    assert runner.iteration == 5, "the run goes on from what it did last, not from the branch it left"
    assert checkpoint_at(tmp_path / "a", 5)["config"]["algorithm"]["clip"] == 0.1


def test_latest_is_never_a_folder_without_a_checkpoint(tmp_path, monkeypatch):
    # Isaac Lab #1209: "latest" picked the directory that had just been made.
    monkeypatch.chdir(tmp_path)
    first = train(CounterEnv(6), small_config(None))
    assert first.run_dir.parts[:2] == ("runs", "toy")
    (first.run_dir.parent / "zzz_newer" / "checkpoints").mkdir(parents=True)
    time.sleep(0.01)
    runner = rs.Runner(CounterEnv(6), small_config(None, resume="latest", iterations=3))
    assert runner.iteration == 2
    result = runner.learn()
    assert result.run_dir == first.run_dir
    assert len(list(first.run_dir.parent.iterdir())) == 2, "no further folder"


def test_latest_without_any_checkpoint_makes_no_folder(tmp_path):
    with pytest.raises(rs.CheckpointError, match="resume=latest: there is no checkpoint"):
        rs.Runner(CounterEnv(6), small_config(tmp_path / "none", resume="latest"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "num_envs, settings, match",
    [
        (8, {}, "num_envs=6, this run has 8"),
        (6, {"model": {"actor_hidden": [9]}}, r"model.actor_hidden=\(8,\), this run has \(9,\)"),
        (6, {"rollout_steps": 5}, "rollout_steps=4, this run has 5"),
        (6, {"reset": "random_clock"}, "reset.name=staggered, this run has random_clock"),
        (6, {"task": "other"}, "task.name=toy, this run has other"),
    ],
)
def test_what_must_agree_is_refused_by_name_with_both_values(tmp_path, num_envs, settings, match):
    train(CounterEnv(6), small_config(tmp_path / "a"))
    config = small_config(tmp_path / "a", resume=str(tmp_path / "a"), **{"num_envs": num_envs, **settings})
    with pytest.raises(rs.CheckpointError, match=match):
        rs.Runner(CounterEnv(num_envs), config)


def test_a_torn_checkpoint_names_the_last_good_one(tmp_path):
    train(CounterEnv(6), small_config(tmp_path / "a", checkpoint={"every_iters": 1}))
    newest = tmp_path / "a" / "checkpoints" / "iter_0000002.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    again = {"resume": str(tmp_path / "a"), "iterations": 3}
    with pytest.raises(rs.CheckpointError, match=r"iter_0000002.pt is torn.*last good one there is .*iter_0000001.pt"):
        rs.Runner(CounterEnv(6), small_config(tmp_path / "a", **again))
    good = {**again, "resume": str(tmp_path / "a" / "checkpoints" / "iter_0000001.pt")}
    assert train(CounterEnv(6), small_config(tmp_path / "a", **good)).summary["iterations"] == 3


def test_an_environment_whose_state_cannot_be_saved_starts_its_episodes_anew(tmp_path):
    without = [Capability.EXACT_RESUME]
    train(CounterEnv(6, without=without), small_config(tmp_path / "a"))
    config = small_config(tmp_path / "a", resume=str(tmp_path / "a"), iterations=4)
    runner = rs.Runner(CounterEnv(6, without=without), config)
    runner.learn()
    assert [line["iteration"] for line in lines_of(tmp_path / "a")] == [1, 2, 3, 4]
    (resumed,) = json.loads((tmp_path / "a" / "environment.json").read_text())["resumes"]
    assert any("cannot be read; episodes start anew" in note for note in resumed["notes"])
    # Brought up again: two warm-ups of 8 steps of 6 environments are in the account.
    assert lines_of(tmp_path / "a")[-1]["steps/warmup"] == 2 * 8 * 6
    assert min(line["batch/coverage"] for line in lines_of(tmp_path / "a")) > 0.9


# -- data that are not finite ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where, named", [("reward", "reward of env 1"), ("obs", r"obs\['policy'\] of env 1")])
def test_data_that_are_not_finite_stop_the_run_and_harm_nothing(tmp_path, where, named, value):
    # K=4: step 10 is the second of iteration 3.
    env = PoisonedEnv(6, 10, where, value)
    config = small_config(tmp_path / "a", reset="synchronous", iterations=5, checkpoint={"every_iters": 1})
    runner = rs.Runner(env, config)
    with pytest.raises(rs.NonFiniteError, match=f"iteration 3: .*{named}: .*first at rollout step "):
        runner.learn()
    saved = checkpoint_at(tmp_path / "a", 2)
    assert [path.name for path in list_checkpoints(tmp_path / "a" / "checkpoints")][-1] == "iter_0000002.pt"
    assert differences(saved["model"], runner.model.state_dict()) == [], "parameters and normalisers of iteration 2"
    assert differences(saved["learner"], runner.learner.state_dict()) == []
    assert all(torch.isfinite(value).all() for value in runner.model.state_dict().values())
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "iteration 3" in summary["error"]
    assert "NonFiniteError" in summary["error"]
    assert [line["iteration"] for line in lines_of(tmp_path / "a")] == [1, 2]
    healthy = small_config(tmp_path / "a", reset="synchronous", iterations=5, resume=str(tmp_path / "a"))
    assert train(CounterEnv(6), healthy).summary["status"] == "finished"


def test_the_rollout_step_of_a_bad_row_is_exact(tmp_path):
    config = small_config(tmp_path / "a", reset="synchronous", iterations=5)
    # Step 10 is the transition out of obs[1] of iteration 3; what it observed is obs[2].
    with pytest.raises(rs.NonFiniteError, match=r"reward of env 1: 1 rows, first at rollout step 1\."):
        train(PoisonedEnv(6, 10, "reward", math.nan), config)
    with pytest.raises(rs.NonFiniteError, match=r"obs\['policy'\] of env 1: 1 rows, first at rollout step 2;"):
        train(PoisonedEnv(6, 10, "obs", math.nan), dataclasses.replace(config, run_dir=str(tmp_path / "b")))


def test_gradients_that_overflow_move_nothing_to_infinity(tmp_path):
    # A reward of 3e38 is finite, its squared error is not.
    runner = rs.Runner(
        PoisonedEnv(6, 6, "reward", 3e38), small_config(tmp_path / "a", reset="synchronous", iterations=3)
    )
    with pytest.raises(rs.NonFiniteError, match="iteration 2: gradients were not finite"):
        runner.learn()
    assert all(torch.isfinite(value).all() for value in runner.model.state_dict().values())
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"


# -- stopping -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_75_and_the_run_goes_on(tmp_path, number):
    run_dir = tmp_path / "run"
    command = [sys.executable, str(REPO / "scripts" / "train.py")]
    small = ["task.settings.horizon_steps=20", "task.settings.num_stages=4", "num_envs=4", "rollout_steps=4",
             "model.actor_hidden=[8]", "model.critic_hidden=[8]", "logging.tensorboard=false",
             "logging.curves=false", "logging.console=plain", f"run_dir={run_dir}"]  # fmt: skip
    process = subprocess.Popen(
        [*command, *small, "iterations=1000000"],
        cwd=str(tmp_path), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while len(read_metrics_lines(run_dir)) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "two iterations take longer than a minute"
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert f"{signal.Signals(number).name}: finishing this iteration" in out
    assert f"resume={run_dir}" in out, "it says how to go on"
    summary = json.loads((run_dir / "summary.json").read_text())
    done = summary["iterations"]
    assert (summary["status"], checkpoint_at(run_dir, done)["iteration"]) == ("interrupted", done)
    again = subprocess.run(
        [*command, f"resume={run_dir}", f"iterations={done + 1}"],
        cwd=str(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert [line["iteration"] for line in read_metrics_lines(run_dir)] == list(range(1, done + 2))
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"


def test_a_second_signal_stops_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    config = small_config(tmp_path / "a", reset="synchronous", iterations=5, checkpoint={"every_iters": 1})
    with pytest.raises(KeyboardInterrupt):
        train(SignalEnv(6, signal.SIGINT, [6, 7]), config)
    assert signal.getsignal(signal.SIGINT) is before, "the handlers of the process are back"
    assert checkpoint_at(tmp_path / "a", 1)["iteration"] == 1
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "stopped"


def test_one_signal_finishes_the_iteration(tmp_path):
    result = train(SignalEnv(6, signal.SIGINT, [6]), small_config(tmp_path / "a", reset="synchronous", iterations=5))
    assert (result.summary["status"], result.summary["iterations"]) == ("interrupted", 2)
    assert checkpoint_at(tmp_path / "a", 2)["iteration"] == 2


# -- seeds, configuration, device -----------------------------------------------------------------------------------
def test_a_seed_is_the_whole_run(tmp_path):
    # Isaac Lab #904.
    def run(name, seed, disturb):
        torch.rand(disturb)
        config = small_config(tmp_path / name, seed=seed, **RESUMED_TASKS["skill_chain"])
        train(native(config), config)
        return whole_state(tmp_path / name, 2), lines_of(tmp_path / name)

    (state, lines), (state_again, lines_again), (other, _) = run("a", 1, 1), run("b", 1, 5), run("c", 2, 1)
    assert differences(state, state_again) == []
    assert lines == lines_again
    for part in ("/model/", "/env/env/"):
        assert any(path.startswith(part) for path in differences(state, other)), part


def test_settings_are_never_edited(tmp_path):
    # rsl_rl #192: the constructor edited the user's dict, so that a second construction failed.
    tree = small_tree(tmp_path / "a", **RESUMED_TASKS["skill_chain"])
    kept = json.loads(json.dumps(tree))
    config = build_config(tree)
    before = to_tree(config)
    settings = config.task.settings
    for _ in range(2):
        rs.Runner(native(config), config)
    rs.Runner(native(config), config).learn()
    assert tree == kept
    assert to_tree(config) == before
    assert config.task.settings is settings


def test_the_device_is_obeyed(tmp_path):
    # Isaac Lab #1012. "meta" is the one other device that every machine has.
    config = small_config(tmp_path / "a", **RESUMED_TASKS["skill_chain"])
    for device in ("cpu", "meta"):
        env = rs.make_env(config.task.name, 6, device, 0, **config.task.settings)
        runner = rs.Runner(env, dataclasses.replace(config, device="cuda:3"))
        assert runner.config.device == device, "the environment is the truth"
        on = {x.device.type for x in runner.model.state_dict().values()}
        on |= {x.device.type for x in runner.learner.optimizer.state_dict().values()}
        on |= {x.device.type for x in runner.statistics.state_dict().values()}
        on |= {runner.collector.rollout.reward.device.type, runner.env.phase_steps.device.type}
        assert on == {device}


def test_threads_are_obeyed(tmp_path):
    before = torch.get_num_threads()
    try:
        rs.Runner(CounterEnv(6), small_config(tmp_path / "a", threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- environments of all kinds --------------------------------------------------------------------------------------
def test_an_environment_without_final_observations_falls_back_by_name(tmp_path):
    runner = rs.Runner(CounterEnv(6, without=[Capability.FINAL_OBS]), small_config(tmp_path / "a", iterations=4))
    assert runner.config.algorithm.bootstrap == "pre_step_value"
    result = runner.learn()
    notes = json.loads((tmp_path / "a" / "environment.json").read_text())["notes"]
    assert any("bootstrap=pre_step_value" in note and "no final observation" in note for note in notes)
    written = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert written["algorithm"]["bootstrap"] == "pre_step_value"
    assert sum(line["episode/count"] for line in lines_of(result.run_dir)) > 0, "a time limit was met"
    plain = rs.Runner(CounterEnv(6), small_config(tmp_path / "b"))
    assert plain.config.algorithm.bootstrap == "final_obs"
    assert not any("bootstrap" in note for note in plain.notes)


def test_what_the_clock_leaves_false_is_written_with_the_run(tmp_path):
    train(CounterEnv(6), small_config(tmp_path / "a", reset="random_clock"))
    notes = json.loads((tmp_path / "a" / "environment.json").read_text())["notes"]
    assert any("states not moved" in note for note in notes)


def test_thirty_lines_of_somebody_elses_environment_train(tmp_path):
    result = train(PlainEnv(16), small_config(tmp_path / "a", reset="synchronous", iterations=6))
    lines = lines_of(tmp_path / "a")
    assert result.summary["status"] == "finished"
    assert result.summary["horizon_steps"] is None
    assert sum(line["episode/count"] for line in lines) >= 16
    assert all("batch/coverage" not in line for line in lines), "no horizon, no phase to cover"
    first = rs.Runner(PlainEnv(16), small_config(tmp_path / "b", reset="synchronous")).model.state_dict()
    moved = differences(dict(first), dict(checkpoint_at(tmp_path / "a", 6)["model"]))
    assert any(path.startswith("/actor") for path in moved)
    assert any(path.startswith("/critic") for path in moved)


def test_a_horizon_that_is_not_there_cannot_be_staggered(tmp_path):
    with pytest.raises(rs.ConfigError, match="no time limit"):
        rs.Runner(PlainEnv(16), small_config(tmp_path / "a"))


def test_a_reset_rule_of_ones_own_is_taken(tmp_path):
    env = rs.StaggeredResets(CounterEnv(6), rollout_steps=4, num_groups=2, gate="block")
    result = train(env, small_config(tmp_path / "a", reset="synchronous"))
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["reset"]["gate"] == "block"
    assert result.summary["reset"] == "custom"
    with pytest.raises(rs.ConfigError, match="rollout_steps=4: the StaggeredResets given was built with 3"):
        rs.Runner(rs.StaggeredResets(CounterEnv(6), rollout_steps=3), small_config(tmp_path / "b"))


@pytest.mark.parametrize("reset", sorted(RESETS))
@pytest.mark.parametrize(
    "num_envs, rollout_steps, minibatches", [(1, 8, 2), (6, 1, 2), (5, 3, 2), (5, 3, 7), (2, 1, 1), (1, 2, 1)]
)
def test_odd_sizes(tmp_path, reset, num_envs, rollout_steps, minibatches):
    config = small_config(
        tmp_path / "a", reset=reset, rollout_steps=rollout_steps, iterations=14, algorithm={"minibatches": minibatches}
    )
    runner = rs.Runner(CounterEnv(num_envs, lengths=[0, 5, 0, 0, 3, 0][:num_envs]), config)
    result = runner.learn()
    assert result.summary["steps_total"] == 14 * num_envs * rollout_steps
    assert all(torch.isfinite(value).all() for value in runner.model.state_dict().values())
    lines = lines_of(tmp_path / "a")
    assert all(math.isfinite(line["policy/loss"]) and math.isfinite(line["critic/loss"]) for line in lines)


@pytest.mark.parametrize("num_envs, rollout_steps, minibatches", [(1, 1, 1), (5, 3, 8), (2, 2, 4)])
def test_minibatches_of_one_row_are_refused(tmp_path, num_envs, rollout_steps, minibatches):
    # SB3 #265: one row has no spread; the advantage becomes NaN.
    config = small_config(tmp_path / "a", reset="synchronous")
    algorithm = dataclasses.replace(config.algorithm, minibatches=minibatches)
    config = dataclasses.replace(config, rollout_steps=rollout_steps, algorithm=algorithm)
    with pytest.raises(
        rs.ConfigError, match=f"algorithm.minibatches={minibatches}: .*= {num_envs * rollout_steps} rows"
    ):
        rs.Runner(CounterEnv(num_envs), config)


# -- the run's folder -----------------------------------------------------------------------------------------------
def test_learning_on_in_one_process_stays_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = rs.Runner(CounterEnv(6), small_config(None))
    first, second = runner.learn(iterations=2), runner.learn(iterations=4)
    assert first.run_dir == second.run_dir
    assert [line["iteration"] for line in lines_of(first.run_dir)] == [1, 2, 3, 4]
    assert second.summary["iterations"] == 4
    assert yaml.safe_load((first.run_dir / "config.yaml").read_text())["iterations"] == 4
    once = small_config(tmp_path / "once", iterations=4)
    train(CounterEnv(6), once)
    assert lines_of(first.run_dir) == lines_of(tmp_path / "once"), "the pause is not to be seen"


def test_a_folder_holds_one_run(tmp_path):
    config = small_config(tmp_path / "a")
    train(CounterEnv(6), config)
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    with pytest.raises(rs.ConfigError, match=r"holds a run already; continue it with resume=latest run_dir="):
        train(CounterEnv(6), config)
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == before


def test_two_runs_of_one_second_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-01-01_00-00-00")
    folders = {train(CounterEnv(6), small_config(None, iterations=1)).run_dir for _ in range(2)}
    assert len(folders) == 2


def test_the_newest_checkpoints_and_the_best_stay(tmp_path):
    # Episodes of 3 steps with rewards 1 + 2 + 3; the best is the first, for nothing later is better.
    config = small_config(
        tmp_path / "a", reset="synchronous", iterations=5, checkpoint={"every_iters": 1, "keep_last": 2}
    )
    train(CounterEnv(6, lengths=[3] * 6), config)
    folder = tmp_path / "a" / "checkpoints"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.json", "best.pt", "iter_0000004.pt", "iter_0000005.pt"]
    assert load_checkpoint(folder / "best.pt")["iteration"] == 1
    assert json.loads((folder / "best.json").read_text()) == {"return_mean": 6.0}


def test_the_best_is_replaced_when_a_better_one_comes(tmp_path):
    class Rising(CounterEnv):
        def step(self, action):
            step = super().step(action)
            step.reward.fill_(float(self.steps_asked))
            return step

    config = small_config(tmp_path / "a", reset="synchronous", iterations=3, checkpoint={"every_iters": 1})
    train(Rising(6, lengths=[4] * 6), config)
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "best.pt")["iteration"] == 3


@pytest.mark.parametrize("marked", [False, True])
def test_terminations_that_all_come_at_one_length_are_warned_of_once(tmp_path, capsys, marked):
    # Isaac Lab-Arena #1015: the time limit was reported as a termination. 20 environments, an end every 5 steps.
    config = small_config(
        tmp_path / "a", reset="synchronous", rollout_steps=5, iterations=12, logging={"console": "plain"}
    )
    env = CounterEnv(20, horizon_steps=5) if marked else CounterEnv(20, horizon_steps=None, lengths=[5] * 20)
    train(env, config)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("episodes were terminated at length 5") == (0 if marked else 1)


def test_terminations_of_many_lengths_are_not_warned_of(tmp_path, capsys):
    config = small_config(
        tmp_path / "a", reset="synchronous", rollout_steps=5, iterations=12, logging={"console": "plain"}
    )
    train(CounterEnv(20, horizon_steps=None, lengths=[5] * 19 + [4]), config)
    assert "terminated at length" not in capsys.readouterr().out


def test_training_outside_the_main_thread_leaves_signals_alone(tmp_path):
    import threading

    results = []
    thread = threading.Thread(target=lambda: results.append(train(CounterEnv(6), small_config(tmp_path / "a"))))
    thread.start()
    thread.join()
    assert results[0].summary["status"] == "finished"


def test_iterations_must_be_at_least_one(tmp_path):
    with pytest.raises(rs.ConfigError, match="iterations=0: at least 1"):
        rs.Runner(CounterEnv(6), small_config(tmp_path / "a")).learn(iterations=0)
    assert not (tmp_path / "a").exists()


def test_environment_json_tells_what_the_run_ran_on(tmp_path):
    train(CounterEnv(6), small_config(tmp_path / "a"))
    told = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["rl_stagger"] == rs.__version__
    assert (told["device"], told["threads"], told["cpu_count"]) == ("cpu", 1, os.cpu_count())
    assert told["git_commit"] is None or len(told["git_commit"].replace("-dirty", "")) == 40


QUIET = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]


# -- what a run says of its environment -----------------------------------------------------------------------------
def test_the_environment_given_is_the_one_recorded_and_evaluated(tmp_path):
    # An env with other settings than the config's, and one of another task.
    for made, settings in (
        ("skill_chain", {"horizon_steps": 40, "num_stages": 4}),
        ("pendulum", {"horizon_steps": 30}),
    ):
        overrides = ["task=skill_chain", "num_envs=6", "rollout_steps=10", "iterations=2", *QUIET]
        config = rs.load_config([*overrides, f"run_dir={tmp_path / made}", "checkpoint.every_iters=1"])
        rs.Runner(rs.make_env(made, 6, **settings), config).learn()
        state = load_checkpoint(tmp_path / made / "checkpoints" / "iter_0000002.pt")
        assert state["config"]["task"] == {"name": made, "settings": settings, "label": None}
        report = evaluate_run(EvaluateConfig(run=str(tmp_path / made), episodes=3))
        assert report["deterministic"]["horizon_steps"] == settings["horizon_steps"]


def test_a_finished_run_is_left_as_it_is(tmp_path):
    config = small_config(tmp_path / "a")
    train(CounterEnv(6), config)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    again = small_config(tmp_path / "a", resume=str(tmp_path / "a"), algorithm={"learning_rate": 1e-4})
    assert train(CounterEnv(6), again).summary["iterations"] == 2
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == before


def test_another_seed_is_refused_at_a_resume(tmp_path):
    train(CounterEnv(6), small_config(tmp_path / "a"))
    config = small_config(tmp_path / "a", resume=str(tmp_path / "a"), seed=9, iterations=3)
    with pytest.raises(rs.CheckpointError, match=r"seed=\d+, this run has 9"):
        rs.Runner(CounterEnv(6), config)


def test_lost_spread_is_said_once(tmp_path, capsys):
    config = rs.load_config(
        ["task=skill_chain", "num_envs=8", "rollout_steps=5", "iterations=6", *QUIET, f"run_dir={tmp_path / 'a'}"]
    )
    config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, console="plain"))
    env = rs.StaggeredResets(rs.make_env("skill_chain", 8, horizon_steps=40), 5)
    runner = rs.Runner(env, config)
    runner.iterate()  # brought up
    env.reset(torch.ones(8, dtype=torch.bool))  # all start again together, as after a common fall
    runner.learn()
    assert capsys.readouterr().out.count("coverage of the horizon is down to") == 1


# -- schedules ------------------------------------------------------------------------------------------------------
def test_rollouts_follow_their_schedule_in_storage_made_once(tmp_path):
    schedule = {"rollout_steps": 2, "rollout_steps_schedule": [[2, 5], [4, 3]], "iterations": 6}
    config = small_config(tmp_path / "straight", reset="staggered_block", **schedule)
    runner = rs.Runner(CounterEnv(6, lengths=[0, 4, 0, 7, 0, 0]), config)
    assert runner.collector.rollout.reward.shape == (5, 6)
    storage = runner.collector.rollout.reward.data_ptr()
    runner.learn()
    assert runner.collector.rollout.reward.data_ptr() == storage
    lines = read_metrics_lines(tmp_path / "straight")
    # 6 environments: 2, 2, 5, 5, 3, 3 steps.
    assert [line["steps/total"] for line in lines] == [12, 24, 54, 84, 102, 120]
    halves = small_config(tmp_path / "halves", reset="staggered_block", **schedule)
    rs.Runner(CounterEnv(6, lengths=[0, 4, 0, 7, 0, 0]), halves).learn(3)
    again = small_config(tmp_path / "halves", reset="staggered_block", resume=str(tmp_path / "halves"), **schedule)
    rs.Runner(CounterEnv(6, lengths=[0, 4, 0, 7, 0, 0]), again).learn(6)
    assert lines_of(tmp_path / "halves") == lines_of(tmp_path / "straight")


def test_the_number_of_groups_follows_what_is_learned(tmp_path):
    # Episodes of CounterEnv return 1 + ... + 12 = 78 as soon as one has ended.
    tree = small_tree(tmp_path, iterations=8)
    tree["reset"] = {"num_groups": 1, "num_groups_by_return": [[70.0, 3]]}
    runner = rs.Runner(CounterEnv(6), build_config(tree))
    runner.learn()
    lines = read_metrics_lines(tmp_path)
    ended = next(i for i, line in enumerate(lines) if line["episode/return_mean"] is not None)
    assert lines[ended]["batch/coverage"] < 0.7
    assert runner.env.num_groups == 3
    assert lines[-1]["batch/coverage"] > 0.9


@pytest.mark.parametrize("signal_name", ["critic_error", "advantage"])
def test_an_adaptive_density_leaves_the_even_one(tmp_path, signal_name):
    tree = small_tree(tmp_path, "adaptive", iterations=8, num_envs=32)
    tree["reset"]["adaptive"] = {"signal": signal_name, "every_iters": 2, "floor": 0.2}
    runner = rs.Runner(CounterEnv(32), build_config(tree))
    runner.learn()
    density = runner.env._upkeep.target.wanted
    assert float(density.sum()) == pytest.approx(1.0)
    assert float(density.min()) >= 0.2 / 3 - 1e-6
    # Rewards grow with the step and an untrained critic says 0: it is the more wrong the later in the episode.
    assert float(density[-1]) > float(density[0]) + 0.05


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(tmp_path):
    train(CounterEnv(6), small_config(tmp_path))
    path = tmp_path / "checkpoints" / "iter_0000002.pt"
    state = torch.load(str(path), weights_only=True)
    del state["steps_total"]
    torch.save(state, str(path))
    with pytest.raises(CheckpointError, match=r"written by an earlier version.*load_policy still work"):
        rs.Runner(CounterEnv(6), small_config(tmp_path, resume=str(path), iterations=4))
    rs.load_policy(path)


@pytest.mark.parametrize("density", ["'1 + 3 * u'", "[1,2,4]", "'exp(-4 * u) / 2'"])
def test_a_folder_named_after_an_expression_is_one_word_for_a_shell(tmp_path, monkeypatch, density):
    monkeypatch.chdir(tmp_path)
    config = rs.load_config(["task=skill_chain", "reset=density", f"reset.density={density}", "iterations=1", *QUIET,
                             "num_envs=8"])  # fmt: skip
    run_dir = rs.Runner(rs.make_env("skill_chain", 8), config).learn().run_dir
    assert re.fullmatch(r"density,density=[\w.,=+-]+_seed0_[\d_-]+", run_dir.name)


@pytest.mark.parametrize(
    "reset, schedule, match",
    [
        ("staggered_block", [[1, 80]], "rollout_steps_schedule: rollout_steps=80: a gate"),
        ("staggered", [[1, 12]], "rollout_steps_schedule: rollout_steps=12: a rollout"),
        ("staggered", [[0, float("inf")]], "rollout_steps_schedule=.*: a list of pairs"),
    ],
)
def test_a_scheduled_rollout_is_judged_at_the_start(reset, schedule, match):
    with pytest.raises(ConfigError, match=match):
        rs.Runner(CounterEnv(6), small_config(None, reset=reset, rollout_steps_schedule=schedule))


def test_a_schedule_from_the_first_iteration_on_is_what_the_run_begins_with(tmp_path):
    config = small_config(
        tmp_path, reset="synchronous", rollout_steps=50, rollout_steps_schedule=[[0, 4]], iterations=3
    )
    runner = rs.Runner(CounterEnv(6), config)
    runner.learn()
    assert runner.config.rollout_steps == 4
    assert [line["batch/coverage"] for line in read_metrics_lines(tmp_path)] == [0.0] * 3, (
        "three windows of 4 in H = 12"
    )
