import json
import math
import os
import sys
import types

import pytest

from rl_stagger.errors import ConfigError
from rl_stagger.logging.writers import (
    JsonLinesWriter,
    TensorBoardWriter,
    WandbWriter,
    Writers,
    as_float,
    read_json_lines,
    strict_json,
)


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def strict(text):
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write_iterations(path, iterations, keep_until=None, **metrics):
    writer = JsonLinesWriter(path, keep_until)
    for i in iterations:
        writer.write(10 * i, {"iteration": i, **metrics})
    writer.close()


# -- JSON lines -----------------------------------------------------------------------------------------------------
def test_nan_and_infinity_are_strict_json(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    nan, inf = float("nan"), float("inf")
    write_iterations(path, [1], a=nan, b=inf, c=-inf, d=None, e=[0.5, nan, inf], f=3)
    (line,) = strict(path.read_text())
    assert line == {
        "iteration": 1,
        "steps/total": 10,
        "a": None,
        "b": "Infinity",
        "c": "-Infinity",
        "d": None,
        "e": [0.5, None, "Infinity"],
        "f": 3,
    }
    assert as_float(line["b"]) == inf
    assert as_float(line["c"]) == -inf
    assert math.isnan(as_float(line["a"]))


def test_foreign_numbers_become_plain_ones():
    numpy = pytest.importorskip("numpy")
    assert strict_json({"a": numpy.float32(0.5), "b": numpy.array([1, 2]), "c": numpy.float64("nan")}) == (
        '{"a": 0.5, "b": [1, 2], "c": null}'
    )


def test_a_line_is_there_before_the_writer_is_closed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(10, {"iteration": 1})
    assert len(strict(path.read_text())) == 1
    writer.close()


def test_a_resume_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_iterations(path, range(1, 8), score=0.1)
    write_iterations(path, [5, 6], keep_until=5, score=0.2)
    lines = strict(path.read_text())
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["score"] for line in lines] == [0.1] * 4 + [0.2] * 2
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("keep_until", [None, 3])
def test_a_torn_last_line_goes(tmp_path, keep_until):
    path = tmp_path / "metrics.jsonl"
    write_iterations(path, [1, 2])
    with path.open("a") as file:
        file.write('{"iteration": 3, "steps/to')
    assert [line["iteration"] for line in read_json_lines(path)] == [1, 2]
    write_iterations(path, [3], keep_until)
    assert [line["iteration"] for line in strict(path.read_text())] == [1, 2, 3]


def test_a_last_line_without_its_newline_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}')
    write_iterations(path, [2])
    assert [line["iteration"] for line in strict(path.read_text())] == [1, 2]


def test_a_kill_while_old_lines_are_dropped_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_iterations(path, [1, 2, 3])
    before = path.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonLinesWriter(path, keep_until=2)
    assert path.read_text() == before


def test_reading_takes_the_newest_of_a_repeated_iteration(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {i}, "life": {life}}}\n' for i, life in [(1, 1), (2, 1), (3, 1), (2, 2)]))
    assert [(line["iteration"], line["life"]) for line in read_json_lines(path)] == [(1, 1), (2, 2)]
    assert read_json_lines(tmp_path / "none.jsonl") == []


# -- several --------------------------------------------------------------------------------------------------------
class Recorder:
    def __init__(self, fails=False):
        self.rows, self.closed, self.fails = [], False, fails

    def write(self, step, metrics):
        self.rows.append((step, metrics))

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk full")


def test_writers_tell_all_and_close_all():
    first, second = Recorder(fails=True), Recorder()
    writers = Writers([first, second])
    writers.write(10, {"iteration": 1})
    assert first.rows == second.rows == [(10, {"iteration": 1})]
    with pytest.raises(OSError, match="disk full"):
        writers.close()
    assert first.closed
    assert second.closed
    Writers().write(1, {})
    Writers().close()


# -- TensorBoard ----------------------------------------------------------------------------------------------------
def read_events(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    return events


def scalars(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_scalars_histograms_and_resume(tmp_path):
    def row(value, histogram):
        return {
            "iteration": 1,
            "return": value,
            "batch/phase_histogram": histogram,
            "critic/per_phase": [None, -0.5],
        }

    first = TensorBoardWriter(tmp_path)
    first.write(100, row(1.0, [0.0, 0.25, 0.75, 0.0]))
    first.write(200, row(None, [None, None, None, None]))
    first.write(300, row(3.0, [0.25] * 4))
    first.close()
    second = TensorBoardWriter(tmp_path, purge_step=201)
    second.write(300, row(float("inf"), [0.25] * 4))
    second.close()

    events = read_events(tmp_path)
    assert scalars(events, "return") == [(100, 1.0), (300, float("inf"))]
    assert scalars(events, "iteration") == [(100, 1.0), (200, 1.0), (300, 1.0)]
    assert not [tag for tag in events.Tags()["scalars"] if "phase" in tag], "no curve for each bin"
    assert events.Tags()["images"] == ["batch/phase_histogram", "critic/per_phase"]
    assert [event.step for event in events.Images("critic/per_phase")] == [300], "the second life's, at its end"
    histograms = events.Histograms("batch/phase_histogram")
    assert [event.step for event in histograms] == [100, 300]
    # Bins 1 and 2 of 4 hold something: from a quarter to three quarters of the horizon.
    value = histograms[0].histogram_value
    assert (value.min, value.max) == (0.25, 0.75)
    assert list(value.bucket) == [0.0, 0.25, 0.75, 0.0]
    assert list(value.bucket_limit) == [0.25, 0.5, 0.75, 1.0]


def test_tensorboard_pictures_come_now_and_then_and_at_the_end(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for i in range(1, 23):
        writer.write(10 * i, {"iteration": i, "critic/x_by_phase": [float(i), None, 0.0], "alone": [1.0]})
    writer.close()
    events = read_events(tmp_path)
    assert events.Tags()["images"] == ["critic/x_by_phase"]
    images = events.Images("critic/x_by_phase")
    assert [event.step for event in images] == [160, 200, 220]
    assert (images[0].width, images[0].height) == (16 * 30, 3 * 53)


# -- Weights & Biases -----------------------------------------------------------------------------------------------
class FakeRun:
    def __init__(self):
        self.rows, self.metrics, self.finished = [], [], False

    def log(self, row):
        self.rows.append(row)

    def define_metric(self, *names, **more):
        self.metrics.append((names, more))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.runs = []

    def init(**arguments):
        module.runs.append((arguments, FakeRun()))
        return module.runs[-1][1]

    module.init = init
    module.Histogram = lambda np_histogram: np_histogram
    module.Image = lambda array: array.shape
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_resumes_the_same_run(tmp_path, wandb):
    writer = WandbWriter("project", "name", {"seed": 1}, tmp_path)
    writer.write(100, {"iteration": 1, "return": None, "lr": 0.5, "phase_histogram": [0.25, 0.75]})
    writer.close()
    WandbWriter("project", "name", {"seed": 1}, tmp_path)
    (first, run), (second, _) = wandb.runs
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert run.finished
    histogram = ([0.25, 0.75], [0.0, 0.5, 1.0])
    assert run.rows == [{"iteration": 1, "lr": 0.5, "phase_histogram": histogram, "steps/total": 100}]


def test_wandb_pictures(tmp_path, wandb):
    lines = [{"iteration": i, "critic/x_by_phase": [0.5, None]} for i in range(1, 17)]
    writer = WandbWriter("project", "name", {}, tmp_path, history=lines[:10])
    for line in lines[10:]:
        writer.write(10 * line["iteration"], line)
    rows = wandb.runs[0][1].rows
    assert rows[:-1] == [{"iteration": i, "steps/total": 10 * i} for i in range(11, 16)]
    assert rows[-1] == {"iteration": 16, "steps/total": 160, "critic/x_by_phase_map": (160, 480, 3)}


def test_wandb_that_is_missing_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'rl_stagger\[wandb\]'"):
        WandbWriter("project", "name", {}, tmp_path)
