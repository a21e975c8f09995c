import csv
import io
import json

import pytest

from rl_stagger.logging.table import differing_keys, find_jobs, print_sweep, split_overrides, sweep_table


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
