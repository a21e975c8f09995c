"""The example in CONTRIBUTING.md is what it says it is: complete, short, and trained by Runner."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import rl_stagger as rs

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]


def test_example_trains_and_improves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drift.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path("drift.py", run_name="__main__")
    (run_dir,) = (tmp_path / "runs").glob("*/*")
    assert run_dir.parent.name == "drift_Drift"
    sys.modules.pop("drift", None)
    overrides = ["task=drift:Drift", "rollout_steps=10", "num_envs=64", "iterations=60", "logging.curves=false"]
    cfg = rs.load_config([*overrides, "logging.tensorboard=false", "logging.console=off", "run_dir=second"])
    summary = rs.Runner(rs.make_env("drift:Drift", 64, horizon_steps=50), cfg).learn().summary
    # Doing nothing drifts 0.1 * 0.5 a step on average and ends near a return of 50 - 0.05 * 50^2 / 2 = -12.
    assert summary["final_return"] > 20
    sys.modules.pop("drift", None)


def test_example_is_short() -> None:
    body = EXAMPLE[EXAMPLE.index("class Drift") : EXAMPLE.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 33
