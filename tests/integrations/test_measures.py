"""Measures worked out by hand: H = 12, K = 4, so three bins of four steps."""

import pytest
import torch

from rl_stagger.integrations.base import Measures

ALL, NONE = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)


def measures(device="cpu", horizon_steps=12):
    return Measures(horizon_steps, 4, torch.device(device))


def test_even_then_all_in_one_bin():
    m = measures()
    for t in range(4):
        m.add(torch.tensor([0, 4, 8]) + t, ALL, NONE)
    assert m.read()["batch/coverage"] == pytest.approx(1.0)
    assert m.read()["batch/tv_distance"] is None  # no batch before
    for t in range(4):
        m.add(torch.tensor([t, t, t]), ALL, ALL if t == 0 else NONE)
    after = m.read()
    assert after["batch/coverage"] == 0.0
    assert after["batch/tv_distance"] == pytest.approx(2 / 3)  # (|1 - 1/3| + 1/3 + 1/3) / 2
    assert after["batch/phase_histogram"] == [1.0, 0.0, 0.0]
    assert (after["resets/per_step_max"], after["resets/per_step_mean"]) == (3.0, 0.75)


def test_the_last_k_steps_count_wherever_the_batch_begins():
    """Three steps in bin 0, then three in bin 2: the last four hold one of the first and three of the others."""
    m = measures()
    for phase in (0, 0, 0, 8, 8, 8):
        m.add(torch.full((3,), phase), ALL, NONE)
    assert m.read()["batch/phase_histogram"] == [0.25, 0.0, 0.75]


def test_invalid_rows_do_not_count():
    m = measures()
    m.add(torch.tensor([0, 4, 8]), torch.tensor([True, True, False]), NONE)
    assert m.read()["batch/phase_histogram"] == [0.5, 0.5, 0.0]


def test_nothing_seen_and_no_time_limit():
    assert set(measures().read().values()) == {None}
    m = measures(horizon_steps=None)
    m.add(torch.tensor([0, 4, 8]), ALL, ALL)
    assert m.read()["batch/coverage"] is None
    assert m.read()["batch/phase_histogram"] is None
    assert m.read()["resets/per_step_max"] == 3.0


def test_nothing_is_read_from_the_device():
    """The meta device has no values: a read would raise."""
    m = measures("meta")
    rows = torch.ones(3, dtype=torch.bool, device="meta")
    for _ in range(9):
        m.add(torch.zeros(3, dtype=torch.int64, device="meta"), rows, rows)
    assert m.on_device()["batch/coverage"].shape == ()
