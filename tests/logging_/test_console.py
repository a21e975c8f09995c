import io
import os

import pytest

from rl_stagger.logging.console import SafeStream, duration, make_console

TITLE = "skill_chain × staggered | [seed 0]"


class Clock:
    """Goes on by `step_s` whenever it is told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


class AsciiTerminal(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii", write_through=True)

    def isatty(self):
        return True

    def getvalue(self):
        return self.buffer.getvalue().decode("ascii")


def metrics(iteration, **more):
    return {
        "iteration": iteration,
        "steps/total": 5120 * iteration,
        "speed/steps_per_s": 51234.5,
        "episode/return_mean": 12.5,
        "episode/length_mean": 199.0,
        "batch/coverage": 0.98,
        "critic/explained_variance": 0.875,
        "optim/lr": 3e-4,
        "policy/kl": 0.0123,
        "batch/phase_histogram": [0.5, 0.5],
        **more,
    }


def run(console, clock, iterations, step_s, **more):
    for i in iterations:
        clock.now_s += step_s
        console.update(metrics(i, **more))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


# -- plain ----------------------------------------------------------------------------------------------------------
def test_plain_lines_are_aligned_and_without_escapes(clock):
    out = io.StringIO()
    console = make_console("auto", 12, TITLE, out, clock)
    run(console, clock, range(1, 13), 2.0)
    console.close()
    title, *lines = out.getvalue().splitlines()
    assert title == TITLE
    assert len(lines) == 12
    assert "\x1b" not in out.getvalue()
    assert len({len(line) for line in lines}) == 1
    assert lines[8].startswith("[ 9/12]  steps        46,080  steps/s    51,234  return      12.50")
    # 9 iterations took 18 s; 3 are left, 2 s each.
    assert lines[8].endswith("elapsed    0:18  left    0:06")
    assert "success" not in out.getvalue()


def test_fast_iterations_make_a_line_a_second_and_the_last(clock):
    out = io.StringIO()
    console = make_console("plain", 100, TITLE, out, clock)
    run(console, clock, range(1, 101), 0.125)
    shown = [int(line[1:4]) for line in out.getvalue().splitlines()[1:]]
    # 12.4 s from the first to the last.
    assert shown[0] == 1
    assert shown[-1] == 100
    assert 11 <= len(shown) <= 15


def test_a_run_that_stops_early_shows_its_last_iteration(clock):
    out = io.StringIO()
    console = make_console("plain", 100, TITLE, out, clock)
    run(console, clock, range(1, 4), 0.125)
    console.close()
    console.close()
    assert [line[:9] for line in out.getvalue().splitlines()[1:]] == ["[  1/100]", "[  3/100]"]


def test_values_persist_with_their_age(clock):
    out = io.StringIO()
    console = make_console("plain", 9, TITLE, out, clock)
    run(console, clock, [1], 2.0, **{"episode/success_rate": 0.25})
    nothing = {"episode/return_mean": None, "episode/length_mean": float("nan"), "episode/success_rate": None}
    run(console, clock, [2, 3], 2.0, **nothing)
    last = out.getvalue().splitlines()[-1]
    assert "return      12.50  length    199.0  success  25.0%" in last
    assert last.endswith("(last episode ended 2 iterations ago)")


def test_odd_values_are_shown(clock):
    out = io.StringIO()
    console = make_console("plain", 9, TITLE, out, clock)
    values = {"policy/kl": float("inf"), "episode/return_mean": None, "optim/lr": "Infinity", "batch/coverage": None}
    run(console, clock, [1], 2.0, **values)
    assert "KL      inf" in out.getvalue()
    assert "return          -" in out.getvalue()


# -- live -----------------------------------------------------------------------------------------------------------
def test_live_table(terminal, clock):
    console = make_console("auto", 10, TITLE, terminal, clock)
    run(console, clock, [1], 2.0)
    run(console, clock, [2, 3], 2.0, **{"episode/return_mean": None})
    console.message("note [64,64]")
    console.close()
    console.close()
    text = terminal.getvalue()
    assert TITLE in text
    for part in ("3/10", "15,360", "12.50", "2 iterations ago", "0.875", "0:14", "note [64,64]"):
        assert part in text
    # The cursor is hidden and comes back.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("columns", ["1", "7", "24", "59"])
def test_narrow_terminals(terminal, clock, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "5")  # the last state stands there in full
    console = make_console("live", 10, TITLE, terminal, clock)
    run(console, clock, range(1, 11), 2.0)
    console.message("a message longer than the terminal is wide")
    console.close()
    assert terminal.getvalue()
    assert "51,200" in terminal.getvalue() or int(columns) < 20


def test_a_terminal_without_unicode(terminal, clock):
    out = AsciiTerminal()
    console = make_console("live", 10, TITLE, out, clock)
    run(console, clock, range(1, 11), 2.0)
    console.message("N × K")
    console.close()
    assert "N ? K" in out.getvalue()
    assert "10/10" in out.getvalue()


def test_live_on_a_dumb_terminal_is_plain(terminal, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = make_console("live", 10, TITLE, terminal, clock)
    run(console, clock, range(1, 11), 2.0)
    console.close()
    assert "\x1b" not in terminal.getvalue()


def test_no_color(terminal, clock, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = make_console("live", 10, TITLE, terminal, clock)
    run(console, clock, range(1, 11), 2.0)
    console.close()
    assert "\x1b[36m" not in terminal.getvalue()


# -- off and gone ---------------------------------------------------------------------------------------------------
def test_off_is_silent(clock):
    out = io.StringIO()
    console = make_console("off", 10, TITLE, out, clock)
    console.message("note")
    run(console, clock, [1], 2.0)
    console.close()
    assert out.getvalue() == ""
    with pytest.raises(ValueError, match="expected auto, live, plain or off"):
        make_console("loud", 10, TITLE)


class PipeTerminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_training_goes_on_when_the_reader_is_gone(terminal, clock, mode):
    reading, writing = os.pipe()
    out = PipeTerminal(os.fdopen(writing, "wb"), encoding="utf-8")
    console = make_console(mode, 10, TITLE, out, clock)
    run(console, clock, [1], 2.0)
    os.close(reading)
    run(console, clock, range(2, 11), 2.0)
    console.message("note")
    console.close()
    # A print of somebody else works as well: nothing is left that could raise at exit.
    print("still here", file=out, flush=True)
    out.close()


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_training_goes_on_when_stdout_is_closed(terminal, clock, mode):
    console = make_console(mode, 10, TITLE, terminal, clock)
    terminal.close()
    run(console, clock, range(1, 11), 2.0)
    console.message("note")
    console.close()


def test_no_stdout_at_all(clock, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    console = make_console("auto", 10, TITLE, clock=clock)
    run(console, clock, range(1, 11), 2.0)
    console.close()
    with pytest.raises(OSError, match="gone"):
        SafeStream(None).fileno()


@pytest.mark.parametrize(
    "seconds, text", [(None, "-"), (float("inf"), "-"), (0.4, "0:00"), (59.6, "1:00"), (3725.0, "1:02:05")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
