"""Isaac Lab itself, without Isaac Sim (Newton physics) on a CPU: `make test-isaaclab`. Its robots are downloads; the
cart-pole here is one of our own with the same joints. One simulation a process, so each test has a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("isaaclab")
pytestmark = pytest.mark.sim

CARTPOLE = Path(__file__).parent / "assets" / "cartpole.usda"
BEGIN = f"""
import json, torch
import rl_stagger as rs

def make(num_envs=8, **settings):
    overrides = {{"scene.robot.spawn.usd_path": {str(CARTPOLE)!r}, "scene.ground": None}}
    return rs.make_env("isaaclab/Isaac-Cartpole", num_envs, seed=0, presets=["physics=newton_mjwarp"],
                       overrides=overrides, **settings)
"""


def run(code: str, tmp_path: Path) -> Any:
    """What `code` wrote into `answer`, run in a process of its own."""
    out = tmp_path / "answer.json"
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}\n{code}\nopen({str(out)!r}, 'w').write(json.dumps(answer))\n", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert out.is_file(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def test_the_contract_is_kept(tmp_path: Path) -> None:
    answer = run(
        "from rl_stagger.envs.check import check_env\n"
        "report = check_env(make(horizon_steps=40))\n"
        "answer = {'text': str(report), 'errors': len(report.errors), 'warnings': len(report.warnings)}",
        tmp_path,
    )
    assert (answer["errors"], answer["warnings"]) == (0, 0), answer["text"]


def test_final_observations_are_those_of_an_episode_that_goes_on(tmp_path: Path) -> None:
    code = """
env = make(horizon_steps={horizon})
env.reset()
answer = {{"done": [], "final": [], "obs": []}}
generator = torch.Generator().manual_seed(0)
for t in range(6):
    step = env.step(torch.rand(8, 1, generator=generator))
    answer["done"].append(step.truncated.tolist())
    answer["final"].append(step.final_obs["policy"].tolist())
    answer["obs"].append(step.obs["policy"].tolist())
"""
    short, long = (run(code.format(horizon=horizon), tmp_path) for horizon in (6, 300))
    assert all(short["done"][5])
    assert not any(long["done"][5])
    assert short["final"] == long["obs"]
    assert short["obs"][5] != short["final"][5]


@pytest.mark.parametrize("reset", ["staggered", "random_clock"])
def test_it_trains(reset: str, tmp_path: Path) -> None:
    answer = run(
        f"cfg = rs.load_config(['task=isaaclab/Isaac-Cartpole', 'reset={reset}', 'num_envs=16', 'rollout_steps=8',\n"
        "    'iterations=4', 'logging.console=off', 'logging.tensorboard=false', 'logging.curves=false',\n"
        f"    'run_dir={tmp_path / 'run'}'])\n"
        "answer = rs.Runner(make(16, horizon_steps=32), cfg).learn().summary",
        tmp_path,
    )
    assert answer["status"] == "finished"
    assert answer["iterations"] == 4
