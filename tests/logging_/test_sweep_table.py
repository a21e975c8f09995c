import csv
import io
import json
import re

import pytest

from rl_stagger.logging.table import differing_keys, find_jobs, fixed, print_sweep, split_overrides, sweep_table


@pytest.fixture(autouse=True)
def any_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def write_job(sweep, name, overrides, **summary):
    job = sweep / name
    job.mkdir(parents=True)
    content = {
        "status": "finished",
        "run_dir": str(job),
        "overrides": overrides,
        "iterations": 200,
        "steps_total": 1024000,
        "final_return": 12.345,
        "final_length": 199.0,
        "best_return": 13.0,
        "explained_variance_p10": 0.75,
        "wall_s": 75.0,
        **summary,
    }
    (job / "summary.json").write_text(json.dumps(content))
    return job


@pytest.fixture
def sweep(tmp_path):
    """Job 2 fell and said so, job 3 was killed, job 4 did not begin."""
    folder = tmp_path / "sweep"
    write_job(folder, "0", ["task=skill_chain", "seed=0", "reset=staggered", "run_dir=a"])
    write_job(folder, "10", ["task=skill_chain", "seed=1", "reset=staggered", "run_dir=b"], final_return=None)
    write_job(
        folder, "2", ["task=skill_chain", "seed=0"], status="failed", error="ConfigError: no\nway", final_return=None
    )
    (folder / "3").mkdir()
    (folder / "3" / "metrics.jsonl").write_text('{"iteration": 7, "steps/total": 70}\n{"itera')
    (folder / "3" / ".hydra").mkdir()
    (folder / "3" / ".hydra" / "overrides.yaml").write_text("- task=skill_chain\n- seed=3\n")
    (folder / "4" / "checkpoints").mkdir(parents=True)
    (folder / ".submitit").mkdir()
    return folder


def test_jobs_in_natural_order_none_lost(sweep):
    assert [job.name for job in find_jobs(sweep)] == ["0", "2", "3", "4", "10"]


def test_nested_jobs(tmp_path):
    write_job(tmp_path, "reset=staggered/seed=0", [])
    write_job(tmp_path, "reset=staggered/seed=1", [])
    names = [job.relative_to(tmp_path).as_posix() for job in find_jobs(tmp_path)]
    assert names == ["reset=staggered/seed=0", "reset=staggered/seed=1"]


def test_only_settings_that_differ_are_columns(sweep):
    columns, rows = sweep_table(find_jobs(sweep))
    assert columns[:4] == ["run", "seed", "reset", "status"]
    assert columns[-1] == "error"
    assert [row["seed"] for row in rows] == ["0", "0", "3", None, "1"]
    assert [row["reset"] for row in rows] == ["staggered", None, None, None, "staggered"]


def test_jobs_without_a_summary_are_failed(sweep):
    _, rows = sweep_table([*find_jobs(sweep), sweep / "5"])
    assert [row["status"] for row in rows] == ["finished", "failed", "failed", "failed", "finished", "failed"]
    assert (rows[2]["iterations"], rows[2]["steps_total"], rows[2]["error"]) == (7, 70, "no summary.json")
    assert rows[5]["error"] == "no run directory"
    (sweep / "0" / "summary.json").write_text('{"status": "fin')
    _, rows = sweep_table([sweep / "0"])
    assert (rows[0]["status"], rows[0]["error"]) == ("failed", "summary.json is unreadable")


def test_print_sweep(sweep):
    out = io.StringIO()
    rows = print_sweep(sweep, stream=out)
    text = out.getvalue()
    assert "5 jobs, 3 failed" in text
    assert "ConfigError: no way" in text
    assert "1,024,000" in text
    assert "12.35" in text or "12.34" in text
    assert "\x1b" not in text
    records = json.loads((sweep / "sweep.json").read_text())
    assert [record["status"] for record in records] == [row["status"] for row in rows]
    assert records[0]["overrides"][0] == "task=skill_chain"
    assert records[2]["run_dir"] == str(sweep / "3")
    with (sweep / "sweep.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table[0]["final_return"] == "12.345"
    assert table[4]["final_return"] == ""
    assert table[2]["run_dir"] == str(sweep / "3")
    assert table[1]["error"] == "ConfigError: no\nway"
    # A second table does not take the first one's files for a job.
    assert print_sweep(sweep, stream=io.StringIO()) == rows


def test_an_empty_sweep(tmp_path):
    assert print_sweep(tmp_path, stream=io.StringIO()) == []
    assert json.loads((tmp_path / "sweep.json").read_text()) == []


def test_a_setting_named_like_a_result(tmp_path):
    jobs = [write_job(tmp_path, str(n), [f"iterations={n}"]) for n in (100, 200)]
    columns, rows = sweep_table(jobs)
    assert columns[:2] == ["run", "iterations="]
    assert (rows[0]["iterations="], rows[0]["iterations"]) == ("100", 200)


def test_overrides():
    chosen = split_overrides(["+a.b=1", "~c", "hydra.job.num=3", "hydra/launcher=x", "run_dir=y", "d=e=f"])
    assert chosen == {"a.b": "1", "c": "", "d": "e=f"}
    assert differing_keys([{"a": "1", "b": "2"}, {}, {"a": "1", "b": "3"}, {"a": "1"}]) == ["b"]


# -- what is on the screen ------------------------------------------------------------------------------------------
@pytest.fixture
def arms(tmp_path):
    """Two rules with three seeds each; the returns of the second are 0, 100, 200."""
    for n in range(6):
        reset, seed = ("synchronous", "staggered")[n // 3], n % 3
        overrides = ["task=pendulum", f"seed={seed}", f"reset={reset}", f"algorithm.learning_rate={n // 3 + 1}e-3"]
        write_job(
            tmp_path / "s", str(n), overrides, final_return=100.0 * seed * (n // 3) - 0.001, best_return=float(n),
            final_success_rate=n / 10, steps_warmup=500 * (n // 3), coverage_min=0.0, wall_s=60.0 + n,
        )  # fmt: skip
    return tmp_path / "s"


def printed(folder):
    out = io.StringIO()
    print_sweep(folder, stream=out)
    return out.getvalue()


def test_the_screen_says_where_the_files_are_and_what_all_have_in_common(arms):
    text = printed(arms)
    assert text.startswith("sweep s: 6 jobs ")
    assert f"written to {arms}/sweep.csv and sweep.json" in text
    common = "finished, iterations 200, env steps 1,024,000, final length 199.00, EV p10 0.750, coverage min 0.000"
    assert f"the same in all: {common}\n" in text
    assert "not shown" not in text


def test_one_job_is_one_job(tmp_path):
    write_job(tmp_path / "s", "0", ["seed=0"])
    text = printed(tmp_path / "s")
    assert text.startswith("sweep s: 1 job ")
    assert "finished" in text
    assert "the same in all" not in text
    assert "over the seeds" not in text
    assert "success" not in text


def test_columns_that_only_some_jobs_have(arms, sweep):
    columns, rows = sweep_table(find_jobs(arms))
    assert [row["final_success_rate"] for row in rows] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert {"steps_warmup", "coverage_min"} <= set(columns), "a coverage of 0 is one"
    columns, _ = sweep_table(find_jobs(sweep))
    assert not {"final_success_rate", "steps_warmup", "coverage_min"} & set(columns)


def test_mean_and_interval_of_each_arm(arms):
    write_job(arms, "6", ["task=pendulum", "seed=3", "reset=synchronous"], status="interrupted", final_return=9e9)
    table = printed(arms).partition("final return over the seeds")[2]
    # 0, 100, 200: standard error 100 / sqrt(3), Student's t with 2 degrees of freedom 4.3027, so 100 +- 248.41.
    assert " ".join(table.split()).count("staggered 2e-3 3 100.00 [-148.41, 348.41]") == 1
    assert "synchronous 1e-3 3 0.00 [0.00, 0.00]" in " ".join(table.split())
    assert "left out: 1 job without" in table


@pytest.mark.parametrize("width", [40, 60, 70, 80])
def test_a_narrow_terminal_has_fewer_columns_not_broken_ones(arms, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(arms)
    lines = [line for line in text.splitlines() if not line.startswith("written to")]
    assert max(map(len, lines)) <= width
    assert (f"not shown in {width} columns, but in sweep.csv: time" in " ".join(text.split())) == (width < 80)
    assert len([line for line in lines if re.match(r"[0-5] +[0-2] ", line)]) == 6, "a line for each job"
    for number in ("100.00", "200.00", "[-148.41, 348.41]"):
        assert number in text


def test_no_minus_zero():
    assert (fixed(-0.0004, 3), fixed(-0.0, 2), fixed(-0.5, 0), fixed(-10.0, 1)) == ("0.000", "0.00", "0", "-10.0")
    assert fixed(-1234.567, 2) == "-1,234.57"
