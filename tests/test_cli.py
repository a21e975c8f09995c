"""The command line from end to end: what a user types, what is left on disk, which exit code comes back."""

import csv
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import rl_stagger
from rl_stagger.checkpoint import load_checkpoint
from rl_stagger.cli import main, pick_device
from rl_stagger.config import build_config
from rl_stagger.errors import ConfigError
from rl_stagger.run_dir import read_metrics_lines

REPO = Path(__file__).resolve().parents[1]
QUIET = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]
TINY = ["num_envs=6", "rollout_steps=4", "iterations=2", "task.settings.horizon_steps=12", "task.settings.num_stages=3",
        "model.actor_hidden=[8]", "model.critic_hidden=[8]", "algorithm.epochs=1", "device=cpu"]  # fmt: skip

NAMED_METRICS = """
episode/return_mean episode/length_mean episode/count episode/partial_count episode/success_rate
batch/coverage batch/tv_distance batch/valid_share resets/per_step_max resets/per_step_mean
critic/explained_variance critic/loss policy/kl policy/entropy policy/clip_share policy/std_mean
optim/lr optim/grad_norm steps/total steps/warmup speed/steps_per_s
time/physics_s time/policy_s time/learn_s time/reset_s time/host_s time/wall_s
""".split()
"""Section 8 of the design."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command is typed in an empty folder."""
    monkeypatch.chdir(tmp_path)


def script(name, *arguments, cwd):
    return subprocess.run(
        [sys.executable, str(REPO / "scripts" / f"{name}.py"), *arguments],
        cwd=str(cwd), capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def only_run(root):
    (path,) = (p.parent for p in Path(root).rglob("config.yaml"))
    return path


def summary_of(run_dir):
    return json.loads((Path(run_dir) / "summary.json").read_text())


def train(*arguments):
    return main(["train", *TINY, *QUIET, *arguments])


# -- train ----------------------------------------------------------------------------------------------------------
def test_a_whole_run_from_another_folder(tmp_path):
    result = script("train", *TINY, "iterations=4", "seed=5", "logging.console=plain", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    run_dir = only_run(tmp_path)
    assert run_dir.relative_to(tmp_path).parts[:2] == ("runs", "skill_chain")
    assert run_dir.name.startswith("staggered_seed5_")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "curves.png", "environment.json"):
        assert (run_dir / name).stat().st_size > 0, name
    assert (run_dir / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = read_metrics_lines(run_dir)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert not [name for name in NAMED_METRICS if name not in line]
        assert {"task/stage"} <= line.keys(), "the task's own log"
    # H=12, K=4: 3 groups, 8 steps of warm-up of 6 environments; 2 environments reset every 4 steps.
    assert (lines[-1]["steps/total"], lines[-1]["steps/warmup"]) == (4 * 24, 48)
    assert [line["batch/coverage"] for line in lines] == pytest.approx([1.0] * 4)
    assert [line["resets/per_step_max"] for line in lines] == [2.0] * 4
    assert [line["resets/per_step_mean"] for line in lines] == [0.5] * 4
    # The first episodes of the groups at 4 and 8 began within the warm-up and are partial: 2 + 2 environments.
    assert [line["episode/partial_count"] for line in lines] == [2, 2, 0, 0]
    assert [line["episode/count"] for line in lines] == [0, 0, 2, 2]
    assert lines[2]["episode/length_mean"] == 12.0
    assert 0.0 <= lines[2]["episode/success_rate"] <= 1.0
    assert all(0 <= line["time/physics_s"] <= line["time/wall_s"] for line in lines)
    parts = sum(lines[1][f"time/{name}_s"] for name in ("physics", "policy", "learn", "reset", "host"))
    assert parts == pytest.approx(lines[1]["time/wall_s"] - lines[0]["time/wall_s"], rel=0.05)
    scalars = tensorboard_scalars(run_dir)
    assert set(NAMED_METRICS) - {"steps/total"} <= scalars.keys() | {"steps/total"}
    assert scalars["optim/lr"] == [(line["steps/total"], pytest.approx(line["optim/lr"])) for line in lines]
    assert load_checkpoint(run_dir / "checkpoints" / "iter_0000004.pt")["iteration"] == 4
    assert load_checkpoint(run_dir / "checkpoints" / "best.pt")["iteration"] == 4
    written = build_config(yaml.safe_load((run_dir / "config.yaml").read_text()))
    assert (written.seed, written.num_envs, written.device) == (5, 6, "cpu")
    told = json.loads((run_dir / "environment.json").read_text())
    assert told["versions"]["rl_stagger"] == rl_stagger.__version__
    assert told["device"] == "cpu"
    assert told["threads"] == 1
    assert "git_commit" in told
    summary = summary_of(run_dir)
    assert (summary["status"], summary["iterations"], summary["reset"]) == ("finished", 4, "staggered")
    assert str(run_dir.relative_to(tmp_path) / "curves.png") in result.stdout, "it says where things are"
    assert "metrics.jsonl" in result.stdout


def tensorboard_scalars(run_dir):
    """Tag -> [(step, value)], from the event files alone."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = {}
    for path in sorted(Path(run_dir).glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    (number,) = value.tensor.float_val
                    found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_main_returns_the_exit_code(tmp_path, capsys):
    assert train(f"run_dir={tmp_path / 'a'}") == 0
    assert "finished after 2 iterations: 48 env steps" in capsys.readouterr().out
    assert not (tmp_path / "a" / "curves.png").exists()
    assert not list((tmp_path / "a").glob("events*"))


@pytest.mark.parametrize("task", ["stage_gridworld", "cartpole_swingup", "pendulum", "point_reach", "legged_bench"])
def test_other_tasks_train_by_name(tmp_path, task):
    sizes = ["num_envs=4", "rollout_steps=4", "iterations=1", "model.actor_hidden=[8]", "model.critic_hidden=[8]"]
    code = main(["train", f"task={task}", *sizes, *QUIET, "reset=random_clock", f"run_dir={tmp_path / 'a'}"])
    assert (code, summary_of(tmp_path / "a")["task"]) == (0, task)


def test_a_task_of_ones_own_in_the_current_folder(tmp_path):
    (tmp_path / "my_robot.py").write_text(
        textwrap.dedent(
            """
            import torch
            from rl_stagger import Box, EnvSpec, Step, VecEnv

            class Robot(VecEnv):
                def __init__(self, num_envs, device, seed, push=1.0):
                    self.num_envs, self.device, self.push = num_envs, torch.device(device), push
                    self.spec = EnvSpec({"policy": (1,)}, Box(1, -1.0, 1.0), None)
                    self.clock = torch.zeros(num_envs, dtype=torch.int64)

                @property
                def elapsed_steps(self):
                    return self.clock.clone()

                def reset(self, env_mask=None):
                    self.clock = torch.zeros_like(self.clock) if env_mask is None else self.clock * ~env_mask
                    return {"policy": self.clock.float().unsqueeze(1)}

                def step(self, action):
                    self.clock = self.clock + 1
                    done, never = self.clock >= 3, torch.zeros(self.num_envs, dtype=torch.bool)
                    reward = torch.full((self.num_envs,), self.push)
                    return Step(self.reset(done), reward, done, never, None, ~never)
            """
        )
    )
    sizes = ["num_envs=4", "rollout_steps=6", "iterations=2"]
    command = ["task=my_robot:Robot", "reset=synchronous", *sizes, *QUIET, "task.settings.push=2.5"]
    result = script("train", *command, "run_dir=out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert summary_of(tmp_path / "out")["final_return"] == 3 * 2.5
    wrong = script("train", "task=my_robot:Robt", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'Robot'?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


# -- resume ---------------------------------------------------------------------------------------------------------
def test_resume_latest_alone_takes_the_saved_settings():
    assert train("iterations=2", "task=skill_chain", "seed=4", "reset=staggered_block") == 0
    run_dir = only_run("runs")
    assert main(["train", "resume=latest", "iterations=3"]) == 0
    assert only_run("runs") == run_dir, "no second folder"
    assert [line["iteration"] for line in read_metrics_lines(run_dir)] == [1, 2, 3]
    written = build_config(yaml.safe_load((run_dir / "config.yaml").read_text()))
    assert (written.seed, written.num_envs, written.reset.name, written.iterations) == (4, 6, "staggered_block", 3)
    assert written.model.actor_hidden == (8,)
    assert written.logging.tensorboard is False


def test_resume_latest_and_nothing_else(capsys):
    assert train("iterations=2") == 0
    run_dir = only_run("runs")
    before = (run_dir / "metrics.jsonl").read_text()
    assert main(["train", "resume=latest"]) == 0
    assert (run_dir / "metrics.jsonl").read_text() == before, "it was finished already"
    assert "finished after 2 iterations" in capsys.readouterr().out


def test_resume_takes_what_is_said_anew(tmp_path):
    assert train("run_dir=first", "checkpoint.keep_last=5") == 0
    assert main(["train", "resume=first", "iterations=3", "algorithm.clip=0.1", "algorithm.learning_rate=2e-3"]) == 0
    written = build_config(yaml.safe_load((tmp_path / "first" / "config.yaml").read_text()))
    assert (written.algorithm.clip, written.algorithm.learning_rate) == (0.1, 2e-3)
    assert (written.algorithm.epochs, written.checkpoint.keep_last) == (1, 5), "the saved, where nothing was said"
    assert summary_of("first")["iterations"] == 3


def test_a_moved_run_goes_on_where_it_is_now(tmp_path):
    assert train("run_dir=old") == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert main(["train", "resume=new", "iterations=3"]) == 0
    assert not (tmp_path / "old").exists()
    assert summary_of("new")["iterations"] == 3


def test_resume_with_what_does_not_fit_is_refused(tmp_path, capsys):
    assert train("run_dir=first") == 0
    assert main(["train", "resume=first", "num_envs=8"]) == 2
    assert "num_envs=6, this run has 8" in capsys.readouterr().err
    assert main(["train", "resume=latest", "run_dir=nothing_here"]) == 2
    assert "no checkpoint under nothing_here" in capsys.readouterr().err
    assert not (tmp_path / "nothing_here").exists()


# -- sweeps ---------------------------------------------------------------------------------------------------------
def test_a_sweep_writes_one_table(tmp_path, capsys):
    assert main(["train", "-m", *TINY, *QUIET, "seed=0,1", "hydra.sweep.dir=sweep"]) == 0
    with open("sweep/sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["status"], row["iterations"]) for row in rows] == [
        ("0", "finished", "2"),
        ("1", "finished", "2"),
    ]
    records = json.loads(Path("sweep/sweep.json").read_text())
    assert [record["seed"] for record in records] == ["0", "1"]
    for seed in (0, 1):
        assert build_config(yaml.safe_load((tmp_path / "sweep" / str(seed) / "config.yaml").read_text())).seed == seed
    assert "2 jobs" in capsys.readouterr().out


def test_a_failing_job_is_shown_and_the_others_run(capsys):
    # num_groups=13 does not fit into H=12.
    sweep = ["reset.num_groups=2,13,3", "hydra.sweep.dir=sweep"]
    assert main(["train", "-m", *TINY, *QUIET, *sweep]) == 2
    with open("sweep/sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["finished", "failed", "finished"]
    assert [row["reset.num_groups"] for row in rows] == ["2", "13", "3"]
    assert "num_groups=13" in rows[1]["error"]
    out = capsys.readouterr()
    assert "3 jobs, 1 failed" in out.out
    assert "reset.num_groups=13" in out.err


def test_a_job_that_crashes_does_not_stop_a_sweep(tmp_path):
    (tmp_path / "crashing.py").write_text(
        textwrap.dedent(
            """
            from rl_stagger.envs.native.pendulum import Pendulum

            class Crashing(Pendulum):
                def step(self, action):
                    if self.gravity_m_s2 == 1.0:
                        raise RuntimeError("the simulator fell over")
                    return super().step(action)
            """
        )
    )
    sizes = ["num_envs=4", "rollout_steps=4", "iterations=1"]
    command = [
        "-m",
        "task=crashing:Crashing",
        *sizes,
        *QUIET,
        "task.settings.gravity_m_s2=1.0,9.0",
        "hydra.sweep.dir=s",
    ]
    result = script("train", *command, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    rows = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["failed", "finished"]
    assert "the simulator fell over" in rows[0]["error"]


def test_a_sweep_into_one_folder_is_refused():
    assert main(["train", "-m", *TINY, *QUIET, "seed=0,1", "run_dir=one", "hydra.sweep.dir=sweep"]) == 2
    assert not Path("one").exists()


# -- evaluate -------------------------------------------------------------------------------------------------------
def test_evaluate_judges_a_run(tmp_path, capsys):
    assert train("run_dir=run") == 0
    assert main(["evaluate", "run=run", "episodes=8"]) == 0
    report = json.loads(Path("run/evaluation.json").read_text())
    assert (report["iteration"], report["task"]) == (2, "skill_chain")
    for kind in ("deterministic", "stochastic"):
        part = report[kind]
        assert (part["episodes"], part["unfinished"], part["length"]["mean"]) == (8, 0, 12.0)
        assert part["return"]["low"] <= part["return"]["mean"] <= part["return"]["high"]
    assert "run/evaluation.json" in capsys.readouterr().out
    again = script("evaluate", "run=run", "episodes=8", "policy=stochastic", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(Path("run/evaluation.json").read_text())["stochastic"] == report["stochastic"], "the same seed"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["run=nowhere"], "run=nowhere: no such file or folder"),
        (["run=x", "episodes"], "'episodes': settings are given as key=value"),
        (["nowhere"], "run=nowhere: no such file or folder"),
        (["run=x", "episode=3"], "did you mean 'episodes'?"),
        (["run=x", "episodes=1"], "episodes=1: at least 2"),
        (["run=x", "policy=best"], "policy=best: both, deterministic or stochastic"),
        ([], "which run?"),
        (["run=x", "device=tpu"], "run=x: no such"),
    ],
)
def test_evaluate_says_what_is_wrong(arguments, says, capsys):
    assert main(["evaluate", *arguments]) == 2
    assert says in capsys.readouterr().err


# -- doctor ---------------------------------------------------------------------------------------------------------
def test_doctor_examines_a_task_and_a_run(tmp_path, capsys):
    assert main(["doctor", "task=skill_chain", *TINY, "seconds=1"]) == 0
    (report,) = Path("runs/doctor").glob("skill_chain_*/doctor.json")
    overrides = json.loads(report.read_text())["recommendation"]["overrides"]
    assert f"overrides: {' '.join(overrides)}" in capsys.readouterr().out
    assert train("run_dir=run") == 0
    again = script("doctor", "run=run", "seconds=1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(Path("run/doctor.json").read_text())["profiles"][0]["policy"] == "trained"
    assert Path("run/doctor.png").is_file()
    assert "run/doctor.json" in again.stdout


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "which task, or which run?"),
        (["task=skill_chain", "num_env=3"], "did you mean 'num_envs'?"),
        (["run=nowhere"], "run=nowhere: no such file or folder"),
        (["task=skill_chain", "seconds=-1"], "seconds=-1.0: above 0"),
    ],
)
def test_doctor_says_what_is_wrong(arguments, says, capsys):
    assert main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err


# -- help and errors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["-h"], 0), (["help"], 0), ([], 2)])
def test_usage(arguments, code, capsys):
    assert main(arguments) == code
    out = capsys.readouterr().out
    assert out.startswith("usage: rl-stagger <command>")
    for word in ("train", "evaluate", "doctor", "task=skill_chain", "Exit codes"):
        assert word in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rl_stagger {rl_stagger.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "there is no command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_help_of_the_commands(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("num_envs", "rollout_steps", "staggered_block", "stage_gridworld"):
        assert word in out
    assert main(["evaluate", "--help"]) == 0
    assert "run=<run directory or checkpoint>" in capsys.readouterr().out
    assert main(["doctor", "--help"]) == 0
    assert "task=<task>" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["num_env=3"], "did you mean 'num_envs'?"),
        (["reset=stagered"], "did you mean 'staggered'?"),
        (["task.settings.num_stage=3"], "did you mean 'num_stages'?"),
        (["task=no_module:X"], "there is no module 'no_module'"),
        (["device=gpu"], "device=gpu"),
        (["device=cuda:99"], "device=cuda:99: torch sees"),
        (["rollout_steps=500"], "use rollout_steps < 12 or reset=synchronous"),
        (["seed=x"], "seed='x': expected a whole number"),
        (["task.settings.gating=2"], "gating=2: a share between 0 and 1"),
        (["task.settings.num_stages=7"], "num_stages=7: between 1 and horizon_steps / 2 = 6"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(arguments, says, tmp_path, capsys):
    assert train(*arguments) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_model_that_does_not_fit_the_task_is_refused(tmp_path, capsys):
    sizes = ["num_envs=4", "rollout_steps=4", "iterations=1", *QUIET]
    assert main(["train", "task=legged_bench", *sizes, "model.distribution=tanh_gaussian"]) == 2
    assert "needs finite bounds" in capsys.readouterr().err
    shared = ["model.shared_trunk=true", "task.settings.critic_obs=true"]
    assert main(["train", "task=legged_bench", *sizes, *shared]) == 2
    assert "actor and critic see different observations" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_data_that_are_not_finite_are_exit_code_3(tmp_path):
    (tmp_path / "broken.py").write_text(
        textwrap.dedent(
            """
            from rl_stagger.envs.native.pendulum import Pendulum

            class Broken(Pendulum):
                def step(self, action):
                    step = super().step(action)
                    step.reward[3] = float("nan")
                    return step
            """
        )
    )
    command = ["task=broken:Broken", "num_envs=4", "rollout_steps=4", "iterations=2", *QUIET, "run_dir=out"]
    result = script("train", *command, cwd=tmp_path)
    assert result.returncode == 3
    assert "iteration 1: not finite" in result.stderr
    assert "reward of env 3" in result.stderr
    assert "Traceback" not in result.stderr
    assert summary_of(tmp_path / "out")["status"] == "failed"


def test_a_folder_that_holds_a_run_is_refused(capsys):
    assert train("run_dir=a") == 0
    assert train("run_dir=a") == 2
    assert "continue it with resume=latest run_dir=a" in capsys.readouterr().err
    assert train("resume=latest", "run_dir=a", "iterations=3") == 0
    assert summary_of("a")["iterations"] == 3


def test_devices():
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") in ("cpu", "cuda:0")
    with pytest.raises(ConfigError, match="device=gpu"):
        pick_device("gpu")


def test_the_process_is_left_as_it_was():
    before = list(sys.argv)
    train("run_dir=a", "iterations=1")
    assert sys.argv == before
