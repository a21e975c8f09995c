import numpy as np
import pytest
from numpy.testing import assert_allclose

from rl_stagger.logging.heat_map import HeatMaps, color_limits, phase_rows, picture

NAN = float("nan")


def row(i, *values):
    return {"iteration": i, "x": list(values)}


def test_rows_fill_gaps_and_change_bins():
    table, first = phase_rows([row(3, 1.0, None), {"iteration": 4}, row(5, 1.0, 2.0, 3.0, 4.0)], "x")
    assert first == 3
    assert_allclose(table, [[1, 1, NAN, NAN], [NAN] * 4, [1, 2, 3, 4]])
    shares, _ = phase_rows([row(1, 0.5, 0.5), row(2, 0.25, 0.25, 0.25, 0.25)], "x", shares=True)
    assert_allclose(shares.sum(1), 1.0)
    assert phase_rows([], "x")[0].size == 0


def test_color_limits():
    table = np.array([[0.0, NAN], [50.0, 100.0]])
    assert color_limits("batch/phase_histogram", table) == (0.0, 1.5)
    assert color_limits("critic/explained_variance_by_phase", table) == (-1.0, 1.0)
    assert color_limits("critic/error_by_phase", table) == pytest.approx((2.0, 98.0))
    assert color_limits("x", np.full((2, 2), 3.0)) == (2.5, 3.5)
    assert color_limits("x", np.full((2, 2), NAN)) == (0.0, 1.0)


def test_a_picture_has_phase_upwards_time_to_the_right_and_grey_gaps():
    # viridis begins at (68, 1, 84) and ends at (253, 231, 36)
    image = picture("critic/explained_variance", np.array([[-1.0, NAN], [1.0, 5.0]]))
    assert image.shape == (160, 480, 3)
    assert image.dtype == np.uint8
    assert image[-1, 0].tolist() == [68, 1, 84]
    assert image[0, 0].tolist() == [217, 217, 217]
    assert image[-1, -1].tolist() == image[0, -1].tolist() == [253, 231, 36]


def test_a_long_run_is_averaged_and_not_thinned_out():
    # 960 iterations on 480 pixels: pairs of -1 and 1 are 0 everywhere; one of a pair missing is the other
    table = np.tile([[-1.0, -1.0], [1.0, NAN]], (480, 1))
    image = picture("explained_variance", table)
    assert image.shape[1] == 480
    middle = picture("explained_variance", np.zeros((1, 2)))[0, 0]
    assert (image[-1] == middle).all()
    assert (image[0] == [68, 1, 84]).all()
    assert picture("explained_variance", table[:-1]).shape[1] == 480


def test_pictures_are_due_ever_more_seldom():
    maps, due = HeatMaps(), []
    for i in range(1, 41):
        maps.add(row(i, 1.0, 2.0))
        if maps.due():
            due.append(i)
            assert list(maps.draw()) == ["x"]
    assert due == [16, 20, 25, 32, 40]
    assert not maps.stale


def test_an_earlier_life_is_in_the_picture_and_not_drawn_again():
    maps = HeatMaps([row(i, 1.0, 2.0) for i in range(1, 18)])
    assert not maps.stale
    maps.add(row(18, 1.0, 2.0))
    assert not maps.due()
    assert maps.stale
    assert maps.draw()["x"].shape[1] == 18 * (480 // 18)
