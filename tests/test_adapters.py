"""The example in docs/adapters.md: complete, short, checked by the contract checker, trained by Runner."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import rl_stagger as rs
from rl_stagger.envs.check import check_env

TEXT = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
SIMULATOR = '''
import numpy as np

class Sim:
    """Carts on a track, in NumPy, in one array that is written again and again."""
    def __init__(self, num_worlds, seed):
        self.random = np.random.default_rng(seed)
        self.state = np.zeros((num_worlds, 2))

    def reset(self, worlds):
        self.state[worlds] = self.random.uniform(-1.0, 1.0, (len(worlds), 2))

    def step(self, controls):
        self.state[:, 1] += 0.1 * controls[:, 0]
        self.state[:, 0] += 0.1 * self.state[:, 1]
'''


@pytest.fixture
def cart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_sim.py").write_text(SIMULATOR, encoding="utf-8")
    (tmp_path / "my_module.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_module:Cart"
    for name in ("my_sim", "my_module"):
        sys.modules.pop(name, None)


def test_the_example_keeps_the_contract(cart: str) -> None:
    report = check_env(rs.make_env(cart, 6, horizon_steps=20))
    assert not report.errors, str(report)
    assert not report.warnings, str(report)


def test_without_the_clone_the_checker_says_so(cart: str) -> None:
    Path("my_module.py").write_text(EXAMPLE.replace(".to(torch.float32, copy=True)", ""), encoding="utf-8")
    Path("my_sim.py").write_text(
        SIMULATOR.replace("(num_worlds, 2))", "(num_worlds, 2), np.float32)"), encoding="utf-8"
    )
    assert check_env(rs.make_env(cart, 6, horizon_steps=20)).errors


def test_the_example_learns(cart: str) -> None:
    quiet = ["logging.curves=false", "logging.tensorboard=false", "logging.console=off", "run_dir=run"]
    cfg = rs.load_config([f"task={cart}", "rollout_steps=10", "num_envs=64", "iterations=60", *quiet])
    lines = rs.Runner(rs.make_env(cart, 64), cfg).learn().summary
    assert lines["final_return"] > 60  # a cart left alone runs off the track; in the middle it earns 1 a step, 100


def test_the_example_is_short() -> None:
    body = EXAMPLE[EXAMPLE.index("class Cart") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40
