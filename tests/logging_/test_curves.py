import json
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose

from rl_stagger.logging.curves import curve, draw_batches, draw_comparison, draw_curves, phase_shares, read_horizon

BINS = 8


def row(i, synchronous):
    histogram = np.full(BINS, 1.0 / BINS)
    if synchronous:
        histogram = np.zeros(BINS)
        histogram[(i - 1) % BINS] = 1.0
    ended = not synchronous or i % BINS == 0
    return {
        "iteration": i,
        "steps/total": 100 * i,
        "episode/return_mean": 0.5 * i if ended else None,
        "episode/return_std": 1.0 if ended else None,
        "episode/length_mean": 200.0 if ended else None,
        "episode/success_rate": i / 40 if ended else None,
        "critic/explained_variance": -1e6 if i == 1 else 0.8,
        "policy/kl": 0.01,
        "optim/lr": 1e-3 * 0.5 ** (i % 9),
        "batch/phase_histogram": histogram.tolist(),
        "batch/coverage": 0.0 if synchronous else 1.0,
        "resets/per_step_max": 64.0 if ended else 0.0,
        "resets/per_step_mean": 0.5,
        "resets/frozen_share": 0.1 if synchronous else 0.0,
        "critic/explained_variance_by_phase": [0.5 if share else None for share in histogram],
        "batch/forgetting_events": int(i % 7 == 0),
        "batch/cyclic_reward": 0.9 if i > 8 else None,
    }


def write_run(path, rows, tail="", horizon_steps=200):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    if horizon_steps is not None:
        (path / "summary.json").write_text(json.dumps({"horizon_steps": horizon_steps}))
    return path


def pixels(path):
    from matplotlib.image import imread

    return imread(str(path))


def assert_picture(path, least_colors):
    """There is more on it than an empty frame."""
    image = pixels(path)
    assert image.shape[0] >= 300
    assert image.shape[1] >= 1000
    assert len(np.unique((image[::3, ::3, :3] * 255).astype(np.uint8).reshape(-1, 3), axis=0)) >= least_colors


# -- arrays ---------------------------------------------------------------------------------------------------------
def test_curve_leaves_out_what_is_not_there():
    lines = [
        {"iteration": 1, "a": None},
        {"iteration": 2, "a": 3.0},
        {"iteration": 3},
        {"iteration": 4, "a": "Infinity"},
    ]
    x, y = curve(lines, "a")
    assert x.tolist() == [2.0]
    assert y.tolist() == [3.0]


def test_phase_shares_fill_gaps_and_change_bins():
    lines = [
        {"iteration": 3, "batch/phase_histogram": [0.25, 0.75]},
        {"iteration": 4, "batch/phase_histogram": None},
        {"iteration": 6, "batch/phase_histogram": [0.1, 0.2, 0.3, 0.4]},
    ]
    shares, first = phase_shares(lines)
    assert first == 3
    nan = [np.nan] * 4
    # Two bins over four: each share is halved, so that a row still sums to one.
    assert_allclose(shares, [[0.125, 0.125, 0.375, 0.375], nan, nan, [0.1, 0.2, 0.3, 0.4]])
    assert phase_shares([{"iteration": 1}])[0].size == 0


@pytest.mark.parametrize("text", [None, "", "[]", '{"horizon_steps": null}', "{}"])
def test_no_horizon(tmp_path, text):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    assert read_horizon(tmp_path) is None


# -- pictures -------------------------------------------------------------------------------------------------------
def test_draw_curves_of_a_run_that_was_killed(tmp_path):
    run = write_run(tmp_path / "run", [row(i, synchronous=True) for i in range(1, 25)], tail='{"iteration": 25, "st')
    path = draw_curves(run)
    assert path == run / "curves.png"
    assert_picture(path, least_colors=60)


@pytest.mark.parametrize("rows", [[], [{"iteration": 1}], [row(1, synchronous=False)]])
def test_draw_curves_of_almost_nothing(tmp_path, rows):
    assert_picture(draw_curves(write_run(tmp_path / "run", rows, horizon_steps=None)), least_colors=10)


def test_draw_comparison(tmp_path):
    runs = {
        "synchronous": write_run(tmp_path / "a", [row(i, synchronous=True) for i in range(1, 33)]),
        "staggered": write_run(tmp_path / "b", [row(i, synchronous=False) for i in range(4, 30)], horizon_steps=None),
    }
    pyplot = "matplotlib.pyplot" in sys.modules
    path = draw_comparison(runs, tmp_path / "pictures" / "batches.png")
    assert_picture(path, least_colors=60)
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


def test_draw_batches_without_curves(tmp_path):
    phases = {"synchronous": np.eye(BINS), "staggered": np.full((BINS, BINS), 1 / BINS), "nothing": np.zeros((0, 0))}
    path = draw_batches(phases, tmp_path / "batches.png", horizon_steps=80, window=(2, 6))
    assert_picture(path, least_colors=10)
