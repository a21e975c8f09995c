"""The doctor from end to end: what it says of small tasks, any environment and finished runs, and what it writes."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.toy_envs import TallyEnv
from helpers.toy_envs_runner import CounterEnv, PlainEnv, small_tree

import rl_stagger.doctor as doctor
from rl_stagger.checkpoint import list_checkpoints
from rl_stagger.config import build_config, load_config
from rl_stagger.doctor import DoctorConfig, diagnose, diagnose_run, diagnose_task, examine, split_arguments
from rl_stagger.envs.base import Capability
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CheckpointError, ConfigError
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.runner import Runner

NETS = ["model.actor_hidden=[16]", "model.critic_hidden=[16]", "algorithm.epochs=2", "algorithm.minibatches=2",
        "device=cpu"]  # fmt: skip
CHAIN = ["task=skill_chain", "num_envs=64", "rollout_steps=5", "task.settings.horizon_steps=100",
         "task.settings.num_stages=20", *NETS]  # fmt: skip
"""H/K = 20, one start state, the later skills behind the earlier ones."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def short(monkeypatch):
    """Trainings of three horizons, so that the work and not the clock ends them."""
    monkeypatch.setattr(doctor, "MOST_HORIZONS", 3)


def is_picture(path):
    return Path(path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# -- tasks ----------------------------------------------------------------------------------------------------------
def test_skill_chain_is_told_to_stagger(short, capsys):
    diagnosis = examine([*CHAIN, "seconds=300"])
    r = diagnosis.recommendation
    assert (r.verdict, r.overrides[0]) == ("stagger", "reset=staggered")
    f = diagnosis.findings
    assert (f.horizon_steps, f.rollout_steps, f.windows, f.num_envs) == (100, 5, 20.0, 64)
    assert f.start_spread == 0.0
    assert f.reference.tv_distance == 1.0
    assert f.rule.tv_distance < 0.05
    assert f.rule.coverage > 0.95
    assert f.rule.explained_p10 > f.reference.explained_p10 + 0.1
    assert f.rule.iterations == f.reference.iterations
    assert f.rule.warmup_steps == 95 * 64
    assert f.costs.group_envs == 3

    (folder,) = Path("runs/doctor").glob("skill_chain_*")
    written = json.loads((folder / "doctor.json").read_text())
    assert written == json.loads(json.dumps(diagnosis.to_tree()))
    assert written["recommendation"]["overrides"] == ["reset=staggered"]
    assert is_picture(folder / "doctor.png")
    printed = capsys.readouterr().out
    for text in ("H/K", "20.0", "tv distance", "explained variance", "overrides: reset=staggered", "doctor.png"):
        assert text in printed
    assert f"{f.rule.explained_p10:.2f}" in printed


def test_steady_locomotion_is_told_to_leave_it(short):
    steady = ["task=legged_bench", "num_envs=32", "rollout_steps=50", "task.settings.horizon_steps=400",
              "task.settings.termination_probability=0.0", *NETS]  # fmt: skip
    diagnosis = diagnose_task(load_config(steady), 300.0)
    assert diagnosis.findings.reference.tv_distance == 1.0, "the phases do move; they look alike"
    assert diagnosis.recommendation.verdict == "leave"
    assert diagnosis.recommendation.overrides == ("reset=synchronous",)


def test_a_rollout_of_half_the_horizon_is_told_to_leave_it_without_training():
    diagnosis = diagnose_task(load_config([*CHAIN, "rollout_steps=50"]), 5.0)
    assert diagnosis.recommendation.verdict == "leave"
    assert diagnosis.lines == {}
    assert diagnosis.findings.costs is not None
    assert len(diagnosis.findings.profiles) == 1


def test_a_large_task_is_trained_with_fewer_environments():
    diagnosis = diagnose_task(load_config([*CHAIN, "num_envs=20000"]), 2.0)
    f = diagnosis.findings
    assert f.num_envs == 20000
    assert 32 <= f.reference.num_envs < 20000
    assert f.costs.group_envs == 1000


def test_the_rule_that_is_asked_about_is_the_one_that_is_tried():
    quick = [*CHAIN, "rollout_steps=25", "num_envs=8"]
    diagnosis = diagnose_task(load_config([*quick, "reset=random_clock"]), 1.0)
    assert diagnosis.rule == "random_clock"
    assert diagnosis.findings.rule.rule == "random_clock"
    assert set(diagnosis.lines) == {"synchronous", "random_clock"}
    asked_synchronous = diagnose_task(load_config([*quick, "reset=synchronous"]), 1.0)
    assert asked_synchronous.findings.rule.rule == "staggered"


# -- any environment ------------------------------------------------------------------------------------------------
def test_any_environment_and_k_alone():
    env = CounterEnv(8, horizon_steps=24, lengths=(3, 3, 3, 3, 3, 3, 0, 0))
    diagnosis = diagnose(env, 4, seconds=2.0)
    f = diagnosis.findings
    assert diagnosis.task.endswith(":CounterEnv")
    assert (f.horizon_steps, f.rollout_steps, f.num_envs, f.windows) == (24, 4, 8, 6.0)
    assert f.early_share == pytest.approx(0.75)  # six of eight
    assert f.profiles[0].hazard[0] == pytest.approx(0.75)  # the third step is number 2, in 0 to 2.4
    assert f.costs.group_envs == 1  # 8 / 6


def test_an_environment_under_a_rule_is_asked_about_with_it():
    env = StaggeredResets(CounterEnv(6), 4, bring_up="clock", name="mine")
    config = build_config(small_tree(task="x", reset="synchronous"))
    assert diagnose(env, config, seconds=1.0).rule == "mine"


def test_a_gate_gives_its_manual_resets_back():
    env = CounterEnv(6)
    diagnosis = diagnose(env, build_config(small_tree(reset="staggered_block")), seconds=1.0)
    assert diagnosis.findings.rule.rule == "staggered_block"
    assert not env.manual_reset


def test_a_simulator_that_can_do_nothing():
    env = TallyEnv(4, 20)
    env.capabilities = frozenset()
    diagnosis = diagnose(env, 4, seconds=1.0)
    assert diagnosis.recommendation.verdict == "impossible"
    assert diagnosis.findings.rule is None
    assert "partial_reset" in diagnosis.findings.refused
    assert diagnosis.findings.costs.one_s is None


def test_without_partial_resets_clocks_are_what_is_left():
    env = CounterEnv(6, without=[Capability.PARTIAL_RESET])
    diagnosis = diagnose(env, 2, seconds=1.0)
    assert "possible here: none, clock" in diagnosis.findings.refused
    assert diagnosis.recommendation.overrides in (("reset=synchronous",), ("reset=staggered", "reset.bring_up=clock"))


def test_no_time_limit():
    diagnosis = diagnose(PlainEnv(4), 4, seconds=1.0)
    assert diagnosis.recommendation.verdict == "leave"
    assert diagnosis.findings.windows == 0.0
    assert diagnosis.lines == {}


# -- finished runs --------------------------------------------------------------------------------------------------
def train(folder, *overrides, iterations=12):
    quiet = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]
    config = load_config([*CHAIN, *quiet, f"run_dir={folder}", f"iterations={iterations}", "num_envs=16",
                          "rollout_steps=10", "task.settings.horizon_steps=40", *overrides])  # fmt: skip
    env = make_env(config.task.name, config.num_envs, "cpu", config.seed, **config.task.settings)
    return Runner(env, config).learn().run_dir


@pytest.fixture(scope="module")
def synchronous_run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run") / "synchronous", "reset=synchronous")


def test_a_finished_synchronous_run(synchronous_run, capsys):
    before = sorted(p.name for p in synchronous_run.iterdir())
    diagnosis = examine([f"run={synchronous_run}", "seconds=2"])
    f = diagnosis.findings
    assert (diagnosis.task, diagnosis.rule, f.horizon_steps, f.windows) == ("skill_chain", "synchronous", 40, 4.0)
    assert f.rule is None
    assert (f.reference.iterations, f.reference.horizons, f.reference.tv_distance) == (12, 3.0, 1.0)
    assert f.reference.reward_cycle is not None
    assert [p.policy for p in f.profiles] == ["trained"]
    assert diagnosis.early_by_third == (0.0, 0.0, 0.0)
    assert f.costs.repetitions >= 3
    after = sorted(p.name for p in synchronous_run.iterdir())
    assert after == sorted([*before, "doctor.json", "doctor.png"])
    assert is_picture(synchronous_run / "doctor.png")
    assert "no training with a staggered rule to compare with" in diagnosis.recommendation.expected
    printed = capsys.readouterr().out
    assert "overrides: reset=" in printed
    assert "terminated in training's thirds" in printed


def test_a_runs_checkpoint_and_its_policy(synchronous_run):
    checkpoint = list_checkpoints(synchronous_run / "checkpoints")[-1]
    diagnosis, folder = diagnose_run(DoctorConfig(run=str(checkpoint), seconds=1.0))
    assert folder == synchronous_run
    assert diagnosis.findings.profiles[0].policy == "trained"


def test_the_latest_run_is_found(synchronous_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="run=latest: there is no checkpoint under runs"):
        diagnose_run(DoctorConfig(run="latest"))
    shutil.copytree(synchronous_run, tmp_path / "runs" / "chain" / "one")
    diagnosis, folder = diagnose_run(DoctorConfig(run="latest", seconds=1.0))
    assert folder == Path("runs/chain/one")
    assert diagnosis.rule == "synchronous"


def test_a_staggered_run_is_the_rules_arm(tmp_path):
    diagnosis, _ = diagnose_run(DoctorConfig(run=str(train(tmp_path / "s", iterations=8)), seconds=1.0))
    assert diagnosis.findings.reference is None
    assert diagnosis.findings.rule.coverage > 0.95


def test_a_run_whose_task_cannot_be_built_is_read_from_its_metrics(tmp_path, capsys):
    run = train(tmp_path / "gone", "reset=synchronous", iterations=8)
    text = (run / "config.yaml").read_text().replace("name: skill_chain", "name: no_module:Gone")
    (run / "config.yaml").write_text(text)
    diagnosis = examine([f"run={run}", "seconds=1"])
    assert "could not be built" in diagnosis.notes[0]
    assert diagnosis.findings.profiles == ()
    assert diagnosis.findings.horizon_steps == 40
    assert diagnosis.findings.reference.tv_distance == 1.0
    assert is_picture(run / "doctor.png")
    assert "could not be built" in capsys.readouterr().out


# -- what is wrong --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "which task, or which run?"),
        (["seconds=3"], "which task, or which run?"),
        (["skill_chain"], "'skill_chain': settings are given as key=value"),
        (["task=skill_chain", "seconds=0"], "seconds=0"),
        (["task=skill_chain", "seconds=soon"], "seconds='soon': expected a number"),
        (["task=skill_chain", "num_env=3"], "did you mean 'num_envs'?"),
        (["task=skill_chan"], "did you mean 'skill_chain'?"),
        (["run=nowhere"], "run=nowhere: no such file or folder"),
        (["run=.", "second=3"], "did you mean 'seconds'?"),
        (["run=."], "holds no metrics.jsonl"),
    ],
)
def test_settings_that_cannot_work_are_named(arguments, says):
    with pytest.raises(ConfigError) as raised:
        examine(arguments)
    assert says in str(raised.value)
    assert not Path("runs").exists()


def test_a_device_belongs_to_the_run_or_to_training():
    assert split_arguments(["run=x", "device=cpu"]) == (DoctorConfig(run="x", device="cpu"), [])
    assert split_arguments(["task=x", "device=cpu", "seconds=5"]) == (
        DoctorConfig(seconds=5.0),
        ["task=x", "device=cpu"],
    )


def test_the_same_seed_finds_the_same(short):
    config = load_config([*CHAIN, "num_envs=8", "rollout_steps=25"])
    one, two = (diagnose_task(config, 300.0).findings for _ in range(2))
    assert (one.profiles, one.reference, one.rule) == (two.profiles, two.reference, two.rule)
