"""isaacgym before torch, where a command line names one of its tasks, and nothing for all others."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

import rl_stagger as rs
from rl_stagger._import_order import wants_isaac_gym
from rl_stagger.envs.isaac_gym_host import import_isaac_gym

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["train", "task=isaacgym/Ant"], True),
        (["-m", "task=isaacgym/Ant,isaacgym/Cartpole", "seed=0,1"], True),
        (["task=pendulum, legged_gym/anymal_c_flat"], True),
        (["task='isaacgym/Ant'"], True),
        (["++task.name=isaacgym"], True),
        (["task=mjlab/go1_flat", "run_name=isaacgym"], False),
        (["task=gym/CartPole-v1"], False),
        (["isaacgym"], False),
        ([], False),
    ],
)
def test_which_command_lines_want_it(words: List[str], wanted: bool) -> None:
    assert wants_isaac_gym(words, {}) == wanted


def test_the_environment_variable(monkeypatch: Any) -> None:
    assert wants_isaac_gym([], {"RL_STAGGER_ISAACGYM": "1"})
    assert not wants_isaac_gym([], {"RL_STAGGER_ISAACGYM": "0"})


@pytest.mark.parametrize("name", ["isaacgym", "pendulum"])
def test_runs_are_known_by_their_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(f"num_envs: 4\ntask:\n  name: {name}\n  settings: {{}}\n", encoding="utf-8")
    for word in (f"resume={tmp_path}", f"run={tmp_path}", f"resume={tmp_path}/checkpoints/000004.pt"):
        assert wants_isaac_gym([word], {}) == (name == "isaacgym")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package isaacgym that refuses to come after torch, as the real one does."""
    (tmp_path / "isaacgym").mkdir()
    (tmp_path / "isaacgym" / "__init__.py").write_text(
        "import sys\nif 'torch' in sys.modules:\n    raise ImportError('PyTorch was imported before isaacgym')\n",
        encoding="utf-8",
    )
    return tmp_path


def python(installed: Path, arguments: List[str], **environ: str) -> str:
    path = os.pathsep.join([str(installed), str(REPO)])
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path, **environ}, cwd=installed,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


PROGRAM = "import rl_stagger, sys; print('isaacgym' in sys.modules)"


def test_comes_first_where_it_is_wanted(installed: Path) -> None:
    assert python(installed, ["-c", PROGRAM, "task=isaacgym/Ant"]) == "True"
    assert python(installed, ["-c", PROGRAM], RL_STAGGER_ISAACGYM="1") == "True"
    assert python(installed, ["-c", PROGRAM, "task=pendulum"]) == "False"
    assert python(installed, ["-c", "import torch; " + PROGRAM, "task=isaacgym/Ant"]) == "False"


def test_too_late_says_what_to_do(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.delitem(sys.modules, "isaacgym", raising=False)
    with pytest.raises(
        rs.ConfigError, match=r"before torch.*`import isaacgym` above `import torch`.*RL_STAGGER_ISAACGYM"
    ):
        import_isaac_gym("isaacgymenvs")


def test_a_failed_import_is_told_when_it_matters(tmp_path: Path) -> None:
    (tmp_path / "isaacgym").mkdir()
    (tmp_path / "isaacgym" / "__init__.py").write_text("raise ImportError('no gym_39.so')\n", encoding="utf-8")
    program = (
        "import rl_stagger\n"
        "try:\n    rl_stagger.make_env('isaacgym', 2)\n"
        "except rl_stagger.ConfigError as error:\n    print(error)"
    )
    assert "no gym_39.so" in python(tmp_path, ["-c", program, "task=isaacgym/Ant"])
