"""A checkpoint is complete or absent: after kills, damage and full disks."""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from recipe.training.checkpoint import (
    CheckpointError,
    best_checkpoint,
    load_checkpoint,
    newest_valid,
    read_manifest,
    save_checkpoint,
    verify,
)
from tests.equal import assert_equal
from tests.limits import files_limited_to

SHARD = "shard-00001-model-00001-of-00001.safetensors"
FILES = (f"model/{SHARD}", f"training/{SHARD}", "manifest.json")
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


def state(step: int) -> dict[str, dict[str, Tensor]]:
    """A state that differs for every step."""
    weights = torch.full((40, 8), float(step))
    return {
        "model": {"embedding": weights, "norm": torch.arange(8) * step},
        "training": {"moments.embedding.exp_avg": weights / 2, "scale": torch.tensor(float(step))},
    }


def save(folder: Path, step: int, val_loss: float | None = None, keep_last: int = 2) -> Path:
    return save_checkpoint(folder, state(step), step, keep_last=keep_last, metadata={"val_loss": val_loss})


def assert_state(path: Path, step: int) -> None:
    """The checkpoint holds the state of this step."""
    assert_equal(load_checkpoint(path), state(step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_loaded_state_is_the_saved_one(tmp_path):
    saved = {
        "model": {
            "transposed": torch.randn(3, 5).t(),
            "row_of_a_larger_one": torch.randn(4, 4)[1],
            "half": torch.randn(3).bfloat16(),
            "parameter": torch.nn.Parameter(torch.randn(2)),
            "empty": torch.zeros(0),
        },
        "training": {"moments.half.step": torch.tensor(7.0), "growth_tracker": torch.tensor(2**40)},
    }
    path = save_checkpoint(tmp_path, saved, 7, keep_last=1, metadata={"config": {"seed": 1}})
    assert_equal(load_checkpoint(path), saved)
    assert read_manifest(path).step == 7
    assert read_manifest(path).metadata == {"config": {"seed": 1}}


def test_weights_are_an_ordinary_safetensors_file(tmp_path):
    weights = safetensors.torch.load_file(save(tmp_path, 5) / "model" / SHARD)
    assert torch.equal(weights["embedding"], state(5)["model"]["embedding"])


def test_one_part_is_loaded_without_reading_the_other(tmp_path):
    path = save(tmp_path, 5)
    (path / FILES[1]).write_bytes(b"damaged")
    assert newest_valid(tmp_path, ["model"]) == (path, [])
    assert_equal(load_checkpoint(path, parts=["model"]), {"model": state(5)["model"]})
    some = load_checkpoint(save(tmp_path, 6), parts=["training"], prefix="moments.")
    assert some["training"].keys() == {"moments.embedding.exp_avg"}
    with pytest.raises(CheckpointError, match="training"):
        load_checkpoint(path)


def test_a_file_is_read_once_for_as_long_as_it_stays_as_it_is(tmp_path, monkeypatch):
    digest, read = hashlib.file_digest, list[str]()

    def counted(file, name):
        read.append(file.name)
        return digest(file, name)

    path = save(tmp_path, 5)
    monkeypatch.setattr(hashlib, "file_digest", counted)
    for _ in range(3):
        newest_valid(tmp_path)
        load_checkpoint(path)
    assert sorted(read) == [str(path / name) for name in FILES[:2]]
    content = bytearray((path / FILES[0]).read_bytes())
    content[-1] ^= 1
    later = (path / FILES[0]).stat().st_mtime_ns + 10**9
    (path / FILES[0]).write_bytes(content)
    os.utime(path / FILES[0], ns=(later, later))  # a file system may note times in steps
    with pytest.raises(CheckpointError, match=r"model/.* has changed"):
        load_checkpoint(path)


def before_each_operation(folder: Path, copies: Path, work: Callable[[], object]) -> list[Path]:
    """Do `work` in another process. Returns copies of the folder, as a kill before each of its file operations would
    leave it, and as it is in the end."""
    pid = os.fork()  # as an audit hook stays for good
    if pid == 0:
        copying = False

        def copy(event, arguments):
            nonlocal copying
            if event in FILE_EVENTS and not copying:
                copying = True
                shutil.copytree(folder, copies / f"{len(names(copies)):03}", symlinks=True)
                copying = False

        copies.mkdir()
        sys.addaudithook(copy)
        work()
        copy("open", ())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return sorted(copies.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("step", [300, 200], ids=["a better one", "the same step again"])
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path, step):
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 100, val_loss=2.0)
    save(checkpoints, 200, val_loss=1.5)
    again = partial(save, checkpoints, step, val_loss=1.0, keep_last=1)
    folders = before_each_operation(checkpoints, tmp_path / "copies", again)
    assert len(folders) > 15, "a save has more file operations than that"
    for folder in folders:
        newest, rejected = newest_valid(folder)
        assert not rejected
        assert read_manifest(newest).step in (200, step)
        assert_state(newest, read_manifest(newest).step)
        best, unreadable = best_checkpoint(folder)
        assert best is not None
        assert not unreadable
        for path in (best, *folder.glob("step-*")):
            verify(path)
        if step == 300:  # the link to a checkpoint that is itself being replaced dangles for a moment
            verify(folder / "best")

        save(folder, 400, keep_last=1)
        assert not [name for name in names(folder) if name.startswith(".")], "leftovers are cleaned by the next save"


def test_files_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_rename(path, target):
        events.append(f"-> {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    folder = tmp_path / "checkpoints"
    save(folder, 100)
    partial = folder / ".partial-step-00000100"
    written = [str(partial / name) for name in (*FILES, "model", "training", "")]
    assert events == [*(name.rstrip("/") for name in written), f"-> {folder / 'step-00000100'}", str(folder)]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "bit flipped", "removed"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(tmp_path, name, damage):
    save(tmp_path, 100)
    newest = save(tmp_path, 200)
    content = bytearray((newest / name).read_bytes())
    if damage == "removed":
        (newest / name).unlink()
    else:
        content[len(content) // 2] ^= 4
        damaged = {"truncated": content[:-1], "emptied": bytearray(), "bit flipped": content}
        (newest / name).write_bytes(damaged[damage])

    path, rejected = newest_valid(tmp_path)
    assert path.name == "step-00000100"
    assert_state(path, 100)
    assert len(rejected) == 1
    assert "step-00000200" in rejected[0]
    assert name in rejected[0]
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(newest)


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed(tmp_path):
    path = save(tmp_path, 100)
    manifest = path / "manifest.json"
    content, good = manifest.read_bytes(), read_manifest(path)
    for position in range(0, len(content), 2):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        manifest.write_bytes(damaged)
        try:
            assert read_manifest(path) == good  # white space that became other white space
        except CheckpointError:
            continue


def test_without_a_valid_checkpoint_every_damaged_one_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        newest_valid(tmp_path)
    for step in (1, 2):
        (save(tmp_path, step) / FILES[1]).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged.*step-00000001 is damaged"):
        newest_valid(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(json.dumps(json.loads((path / "manifest.json").read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99, and this version reads format 2"):
        load_checkpoint(path)


def assert_nothing_changed(folder: Path) -> None:
    assert names(folder) == {"step-00000100", "step-00000200", "best"}
    assert_state(newest_valid(folder)[0], 200)


@pytest.mark.parametrize("limit", [0, 50, 1000])
def test_a_file_that_cannot_be_written_is_one_clear_error_and_leaves_what_was_there(tmp_path, limit):
    folder = tmp_path / "run" / "checkpoints"
    save(folder, 100, val_loss=2.0)
    save(folder, 200, val_loss=1.0)
    with (
        files_limited_to(limit),
        pytest.raises(CheckpointError, match=r"step-00000300 .*File too large.*Allow .*resume=.*run\.$"),
    ):
        save(folder, 300, val_loss=0.5, keep_last=1)
    assert_nothing_changed(folder)
    save(folder, 300)
    assert_state(newest_valid(folder)[0], 300)


def test_a_full_disk_says_to_free_some_space_and_an_interrupt_leaves_nothing_half_written(tmp_path, monkeypatch):
    failure: BaseException = KeyboardInterrupt()

    def fail(*_, **options):
        raise failure

    save(tmp_path / "checkpoints", 100, val_loss=2.0)
    save(tmp_path / "checkpoints", 200, val_loss=1.0)
    monkeypatch.setattr(safetensors.torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "checkpoints", 300)
    assert_nothing_changed(tmp_path / "checkpoints")
    failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(CheckpointError, match=r"No space left.*Free some space, and continue with resume="):
        save(tmp_path / "checkpoints", 300)
    assert_nothing_changed(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"Free some space, and train again\.$"):
        save(tmp_path / "other" / "checkpoints", 100)  # from which nothing could continue


def test_a_kill_and_then_a_failing_save_leave_the_checkpoint_that_was_being_replaced(tmp_path):
    save(tmp_path, 100).rename(tmp_path / ".replaced-step-00000100")  # the state after a kill between the two renames
    assert_state(newest_valid(tmp_path)[0], 100)
    with files_limited_to(50), pytest.raises(CheckpointError, match="File too large"):
        save(tmp_path, 100)
    assert newest_valid(tmp_path) == (tmp_path / "step-00000100", [])
    assert names(tmp_path) == {"step-00000100"}


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, val_loss, steps, best in (
        (1, 3.0, {1}, 1),
        (2, 1.0, {1, 2}, 2),
        (3, 2.0, {2, 3}, 2),
        (4, None, {2, 3, 4}, 2),
        (5, float("nan"), {2, 4, 5}, 2),  # a loss that is not finite never counts as the best
        (6, 0.5, {5, 6}, 6),
        (7, 0.5, {6, 7}, 6),  # of equals, the earliest
    ):
        save(tmp_path, step, val_loss, keep_last=2)
        assert names(tmp_path) == {"best", *(f"step-{kept:08d}" for kept in steps)}
        assert (tmp_path / "best").resolve().name == f"step-{best:08d}"
    assert_state(tmp_path / "best", 6)
    assert best_checkpoint(tmp_path) == (tmp_path / "step-00000006", {})


def test_a_checkpoint_whose_manifest_cannot_be_read_is_named_and_never_removed(tmp_path):
    save(tmp_path, 1, val_loss=1.0)
    save(tmp_path, 2, val_loss=2.0, keep_last=1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"1.0", b"7.0"))
    for step in (3, 4):
        save(tmp_path, step, val_loss=3.0, keep_last=1)
    best, unreadable = best_checkpoint(tmp_path)
    assert best == tmp_path / "step-00000002"
    assert "step-00000001 is damaged: the content of manifest.json has changed" in unreadable[manifest.parent]
    assert names(tmp_path) == {"step-00000001", "step-00000002", "step-00000004", "best"}
    save(tmp_path, 1)  # a run that went back comes to it again
    assert len(list(tmp_path.glob(f"unreadable-step-00000001-*/{FILES[0]}"))) == 1


def test_a_copy_of_the_run_folder_without_links_goes_on(tmp_path):
    save(tmp_path / "run", 1, 2.0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    assert not (tmp_path / "copy" / "best").is_symlink()
    save(tmp_path / "copy", 2, 1.0)
    assert (tmp_path / "copy" / "best").readlink() == Path("step-00000002")
    assert names(tmp_path / "copy") == {"step-00000001", "step-00000002", "best"}


def test_a_run_resumed_before_a_damaged_checkpoint_keeps_the_new_checkpoints(tmp_path):
    save(tmp_path, 400)
    (save(tmp_path, 500) / FILES[0]).write_bytes(b"")
    save(tmp_path, 450, keep_last=1)
    assert newest_valid(tmp_path)[0].name == "step-00000450"
    save(tmp_path, 500, keep_last=1)
    assert newest_valid(tmp_path) == (tmp_path / "step-00000500", [])
    assert names(tmp_path) == {"step-00000500"}
