"""Checkpoint files: whole or refused by name, never half."""

import os
import random

import pytest
import torch

from rl_stagger.checkpoint import (
    CheckpointStore,
    file_fault,
    list_checkpoints,
    load_checkpoint,
    resolve_resume,
    run_dir_of,
)
from rl_stagger.errors import CheckpointError

STATE = {
    "config": {"task": {"name": "toy", "settings": {"sizes": [1, 2]}}, "shape": (3, 4), "resume": None},
    "model": {"w": torch.arange(600.0).reshape(20, 30), "flags": torch.tensor([True, False])},
    "rate": torch.tensor(1e-3),
    "note": "text",
}


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def saved(folder, *iterations, keep_last=9, best=False):
    store = CheckpointStore(folder, keep_last)
    return [store.save(i, STATE, best) for i in iterations]


def test_what_is_saved_comes_back(tmp_path):
    (path,) = saved(tmp_path / "checkpoints", 7)
    assert path.name == "iter_0000007.pt"
    state = load_checkpoint(path)
    assert state["iteration"] == 7
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert state["model"]["flags"].dtype == torch.bool
    assert {key: state[key] for key in ("config", "note")} == {key: STATE[key] for key in ("config", "note")}
    assert os.listdir(str(path.parent)) == [path.name], "nothing temporary is left"


def test_the_newest_stay(tmp_path):
    saved(tmp_path, 1, 2, 9, 10, 11, keep_last=2)
    assert names(tmp_path) == ["iter_0000010.pt", "iter_0000011.pt"], "by number, 9 before 10"


def test_the_one_just_saved_always_stays(tmp_path):
    saved(tmp_path, 10, 20, 30, 40)
    (path,) = saved(tmp_path, 25, keep_last=2)  # somebody went back to 20
    assert path.exists()
    assert names(tmp_path) == ["iter_0000020.pt", "iter_0000025.pt"]


def test_saving_the_same_iteration_again_replaces_it(tmp_path):
    saved(tmp_path, 3, 4, 4, keep_last=2)
    assert names(tmp_path) == ["iter_0000003.pt", "iter_0000004.pt"]


def test_the_best_is_a_file_of_its_own(tmp_path):
    saved(tmp_path, 1, best=True)
    saved(tmp_path, 2, 3, keep_last=1)
    assert load_checkpoint(tmp_path / "best.pt")["iteration"] == 1
    assert names(tmp_path) == ["iter_0000003.pt"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    (path,) = saved(tmp_path, 1)
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"pickle|local"):
        CheckpointStore(tmp_path, 3).save(1, {"bad": lambda: None}, False)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# -- torn and foreign -----------------------------------------------------------------------------------------------
def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_the_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    # Within the tensor of 2,400 bytes, which no format would notice but its checksum.
    content = bytearray(path.read_bytes())
    place = content.index(torch.tensor(299.0).numpy().tobytes())
    content[place] ^= 0x10
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("not a checkpoint\n")


def other_torch_file(path):
    torch.save({"model": torch.zeros(3)}, str(path))


def other_type(path):
    torch.save([1, 2], str(path))


def newer_version(path):
    torch.save({"format": "rl_stagger.checkpoint", "version": 99}, str(path))


def no_version(path):
    torch.save({"format": "rl_stagger.checkpoint"}, str(path))


def harmful_pickle(path):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(path.parent / "harm"),))

    torch.save({"format": "rl_stagger.checkpoint", "version": 1, "x": Harm()}, str(path))


def missing(path):
    path.unlink()


@pytest.mark.parametrize(
    "harm, says",
    [
        (truncate, "is torn"),
        (lose_the_last_byte, "is torn"),
        (flip, "is damaged in its part"),
        (empty, "is torn or not a checkpoint"),
        (text, "is torn or not a checkpoint"),
        (other_torch_file, "was not written by rl_stagger"),
        (other_type, "was not written by rl_stagger"),
        (newer_version, "has format version 99; this rl_stagger reads version 1"),
        (no_version, "has format version None"),
        (harmful_pickle, "cannot be read"),
        (missing, "does not exist"),
    ],
)
def test_what_is_no_checkpoint_is_refused_and_the_last_good_one_named(tmp_path, harm, says):
    _, good, path = saved(tmp_path, 1, 2, 3)
    harm(path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert says in message
    assert f"The last good one there is {good}" in message
    assert not (tmp_path / "harm").exists()


def test_a_torn_one_is_not_named_as_the_last_good_one(tmp_path):
    good, second, third = saved(tmp_path, 1, 2, 3)
    truncate(second)
    flip(third)
    with pytest.raises(CheckpointError, match=f"last good one there is {good}"):
        load_checkpoint(third)


def test_with_nothing_good_left_it_says_so(tmp_path):
    (path,) = saved(tmp_path, 1)
    truncate(path)
    with pytest.raises(CheckpointError, match="There is no other good checkpoint in"):
        load_checkpoint(path)


def test_any_flipped_bit_is_refused_or_harmless(tmp_path):
    (path,) = saved(tmp_path, 1)
    whole = path.read_bytes()
    draw = random.Random(0)
    # Heads and the directory at the end as well, not only the long middle.
    places = [*range(48), *range(len(whole) - 80, len(whole)), *(draw.randrange(len(whole)) for _ in range(80))]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(content))
        try:
            state = load_checkpoint(path)
        except CheckpointError:
            continue
        assert torch.equal(state["model"]["w"], STATE["model"]["w"]), place
        assert (state["iteration"], state["note"], state["config"]) == (1, "text", STATE["config"]), place


def test_a_good_file_has_no_fault(tmp_path):
    (path,) = saved(tmp_path, 1)
    assert file_fault(path) is None


# -- resume=... -----------------------------------------------------------------------------------------------------
def aged(path, seconds):
    os.utime(str(path), (1_000_000 + seconds, 1_000_000 + seconds))
    return path


def test_latest_is_the_newest_file_below(tmp_path):
    (old,) = saved(tmp_path / "a" / "checkpoints", 900)
    (new,) = saved(tmp_path / "b" / "deeper" / "checkpoints", 5)
    aged(old, 1)
    aged(new, 2)
    assert resolve_resume("latest", tmp_path) == new
    aged(old, 3)
    assert resolve_resume("latest", tmp_path) == old
    assert resolve_resume("latest", tmp_path / "b") == new


def test_latest_passes_over_folders_without_one_and_over_other_files(tmp_path):
    (good,) = saved(tmp_path / "a" / "checkpoints", 1)
    aged(good, 1)
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    (tmp_path / "c" / "checkpoints" / ".iter_0000009.pt.12.tmp").write_text("a save that was killed")
    (tmp_path / "c" / "checkpoints" / "iter_x.pt").write_text("?")
    assert resolve_resume("latest", tmp_path) == good


def test_a_folder_or_a_file_may_be_named(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    first, second = saved(folder, 9, 10, best=True)
    assert resolve_resume(str(tmp_path / "run"), tmp_path) == second
    assert resolve_resume(str(folder), tmp_path) == second
    assert resolve_resume(str(first), tmp_path) == first
    assert resolve_resume(str(folder / "best.pt"), tmp_path) == folder / "best.pt"
    assert run_dir_of(first) == tmp_path / "run"
    assert run_dir_of(tmp_path / "copied.pt") == tmp_path


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="resume=latest: there is no checkpoint under"):
        resolve_resume("latest", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no such file or folder; give latest"):
        resolve_resume(str(tmp_path / "x.pt"), tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint in that folder"):
        resolve_resume(str(tmp_path), tmp_path)
