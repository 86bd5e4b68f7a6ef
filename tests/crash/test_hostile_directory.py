"""Other programs change, damage or trap a directory. No acknowledged checkpoint and no foreign file is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from typer.testing import CliRunner

from holdall import CheckpointError, DamageError, FencedError, HoldallError, ReplayMemory
from holdall.checkpoint import open_reader
from holdall.checkpoint.directory_blobs import FileSystem
from holdall.checkpoint.manifest import append_checksum, strip_checksum
from holdall.cli.checkpoint import checkpoint
from holdall.store.tuning import Tuning

from .nursery import LANES, SPACE, TUNING, grow, require_right

posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX file system")


def make_memory(capacity_ticks: int = 4000, tuning: Tuning | None = None) -> ReplayMemory:
    """Return a memory whose ticks are in one segment, unless `tuning` says otherwise."""
    return ReplayMemory(SPACE, spaces.Discrete(5), capacity_ticks * LANES, LANES, budget=None, seed=1, _tuning=tuning)


def get_manifest_path(run: Path, number: int) -> Path:
    return run / "manifests" / f"{number:016d}.json"


def load_ticks(run: Path, **settings: Any) -> int:
    """Load a checkpoint, compare every row, and return the number of ticks."""
    with ReplayMemory.load(run, **settings) as loaded:
        require_right(loaded)
        return int(loaded.next_id) // LANES


def find_own_files(run: Path, number: int) -> list[Path]:
    """Return the files that only this checkpoint names."""
    reader = open_reader(run)
    others = {name for other in reader.numbers() if other != number for name in reader.manifest(other).files}
    return [run / "segments" / name for name in reader.manifest(number).files if name not in others]


def run_command(*words: Any) -> Any:
    result = CliRunner().invoke(checkpoint, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of two checkpoints, of 60 and of 120 ticks."""
    with make_memory() as memory:
        for _ in range(2):
            grow(memory, 60)
            memory.save(tmp_path / "run").result()
    return tmp_path / "run"


# ---------------------------------------------------------------- files of other programs


def test_foreign_files_are_never_removed(run: Path) -> None:
    """Some foreign files have names like holdall's temporary files."""
    theirs = [
        run / "notes.tmp",
        run / "manifests" / "mine.tmp",
        run / "segments" / "weights.seg",
        run / "segments" / "0123.seg.tmp",
        run / "manifests" / "1.json",
    ]
    for path in theirs:
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    for folder in (run, run / "segments", run / "manifests"):
        (folder / "x.tmp").mkdir()
    (run / "segments" / f"{'a' * 16}-{'0' * 16}.seg.tmp").mkdir()
    with ReplayMemory.load(run) as memory:
        grow(memory, 3)
        memory.save(run, keep=1).result()
    run_command("gc", run, "--keep", 1)
    assert [path.read_bytes() for path in theirs] == [b"mine"] * len(theirs)
    assert load_ticks(run) == 123


def test_temporary_files_of_a_dead_writer_are_removed(run: Path) -> None:
    """The next writer that takes the lock removes it."""
    names = [
        f"segments/{'a' * 16}-{'0' * 16}.seg.{'b' * 16}.tmp",
        f"segments/{'a' * 16}-{'0' * 16}.seg",
        f"manifests/{9:016d}.json.{'a' * 16}.tmp",
    ]
    for name in names:
        (run / name).write_bytes(b"half")
    run_command("gc", run)
    assert not any((run / name).exists() for name in names)
    assert load_ticks(run) == 120


@posix
@pytest.mark.parametrize("folder", ["manifests", "segments"])
def test_a_folder_that_is_a_link_is_refused(run: Path, tmp_path: Path, folder: str) -> None:
    """No file in the target of the link is read or removed."""
    (run / folder).rename(tmp_path / "elsewhere")
    stray = tmp_path / "elsewhere" / f"{'a' * 16}-{'0' * 16}.seg.tmp"
    stray.write_bytes(b"mine")
    os.utime(stray, (0, 0))
    (run / folder).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    with pytest.raises(HoldallError, match=rf"{folder}.* is a link"):
        ReplayMemory.load(run)
    with make_memory() as memory, pytest.raises(HoldallError, match=rf"{folder}.* is a link"):
        memory.save(run).result()
    for command in ("ls", "verify", "gc"):
        assert run_command(command, run).exit_code == 1
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == before


@posix
def test_a_link_in_place_of_a_file_is_not_followed(run: Path, tmp_path: Path) -> None:
    """The link counts as damage. A save changes neither the link nor its target."""
    victim = find_own_files(run, 2)[0]
    victim.rename(tmp_path / "target")
    victim.symlink_to(tmp_path / "target")
    assert load_ticks(run) == 60
    assert run_command("verify", run).exit_code == 3
    with ReplayMemory.load(run) as memory:
        memory.save(run, keep=1).result()
    assert (tmp_path / "target").stat().st_size > 0


@posix
def test_a_lock_that_is_a_link_or_a_pipe_is_refused(run: Path, tmp_path: Path) -> None:
    """The target of the link is not created."""
    (run / "LOCK").unlink()
    (run / "LOCK").symlink_to(tmp_path / "made")
    with make_memory() as memory, pytest.raises(DamageError, match="LOCK"):
        memory.save(run).result()
    assert not (tmp_path / "made").exists()
    (run / "LOCK").unlink()
    os.mkfifo(run / "LOCK")
    with make_memory() as memory, pytest.raises(DamageError, match="LOCK"):
        memory.save(run).result()


# ---------------------------------------------------------------- acknowledged checkpoints


def test_missing_and_cut_files_are_written_again(tmp_path: Path) -> None:
    """The next checkpoint has all transitions."""
    with make_memory() as memory:
        grow(memory, 200)
        memory.save(tmp_path).result()
        for path in [*(tmp_path / "segments").iterdir(), *(tmp_path / "manifests").iterdir()]:
            path.unlink()
        grow(memory, 5)
        memory.save(tmp_path).result()
        assert load_ticks(tmp_path) == 205
        victim = max((tmp_path / "segments").iterdir(), key=lambda path: path.stat().st_size)
        victim.write_bytes(victim.read_bytes()[:-1])
        grow(memory, 5)
        with contextlib.suppress(CheckpointError):  # The file exists, but the commit notices that it is cut.
            memory.save(tmp_path).result()
        memory.save(tmp_path).result()
    assert load_ticks(tmp_path) == 210


def test_a_file_that_vanishes_during_a_save_fails_this_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not acknowledged, the error names the file, and the next save writes everything again."""
    with make_memory(tuning=TUNING) as memory:
        grow(memory, 200)
        memory.save(tmp_path).result()
        victim = max((tmp_path / "segments").iterdir(), key=lambda path: path.stat().st_size)
        create = FileSystem.create

        def remove_and_create(own: FileSystem, path: Path) -> int:
            victim.unlink(missing_ok=True)
            return create(own, path)

        grow(memory, 5)
        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, "create", remove_and_create)
            with pytest.raises(CheckpointError, match=victim.name):
                memory.save(tmp_path).result()
        grow(memory, 5)
        memory.save(tmp_path).result()
    assert load_ticks(tmp_path) == 210


def test_only_whole_checkpoints_count_for_keep(run: Path) -> None:
    """A damaged newest checkpoint does not count, so the older whole one is kept."""
    find_own_files(run, 2)[0].unlink()
    run_command("gc", run, "--keep", 1)
    assert load_ticks(run) == 60
    with ReplayMemory.load(run) as memory:
        memory.save(run, keep=1).result()
    assert load_ticks(run) == 60
    assert not get_manifest_path(run, 2).exists()


@posix
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_directory_that_was_removed_can_be_saved_to_again(tmp_path: Path, is_made_again: bool) -> None:
    """The directory may have been made again. The lock in the removed directory does not count."""
    with make_memory() as memory:
        for ticks in (100, 103, 106):
            grow(memory, ticks - memory.next_id // LANES)
            memory.save(tmp_path / "run").result()
            assert load_ticks(tmp_path / "run") == ticks
            shutil.rmtree(tmp_path / "run")
            if is_made_again:
                (tmp_path / "run").mkdir()
        grow(memory, 4)
        memory.save(tmp_path / "run").result()
        with make_memory() as other, pytest.raises(FencedError):
            other.save(tmp_path / "run").result()
    assert load_ticks(tmp_path / "run") == 110


@posix
def test_a_directory_that_is_removed_during_a_save_fails_this_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule holds for every call that finds the directory missing."""
    with make_memory() as memory:
        grow(memory, 60)
        memory.save(tmp_path / "run").result()
        for call in ("create", "write", "link", "sync_directory"):
            method = getattr(FileSystem, call)

            def remove_and_call(own: FileSystem, *arguments: Any, method: Any = method) -> Any:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                return method(own, *arguments)

            grow(memory, 3)
            with monkeypatch.context() as patch:
                patch.setattr(FileSystem, call, remove_and_call)
                with pytest.raises(CheckpointError):
                    memory.save(tmp_path / "run").result()
            memory.save(tmp_path / "run").result()
            assert load_ticks(tmp_path / "run") == memory.next_id // LANES


@posix
def test_a_writer_refuses_to_save_to_a_directory_of_another_writer(tmp_path: Path) -> None:
    """The directory was removed, and another memory saved to the same path."""
    with make_memory() as first, make_memory() as second:
        grow(first, 20)
        grow(second, 30)
        first.save(tmp_path / "run").result()
        shutil.rmtree(tmp_path / "run")
        second.save(tmp_path / "run").result()
        with pytest.raises(FencedError):
            first.save(tmp_path / "run").result()
        second.save(tmp_path / "run").result()
        assert load_ticks(tmp_path / "run") == 30


def test_an_empty_manifest_with_the_highest_number_hides_no_checkpoint(run: Path) -> None:
    """Later checkpoints are saved and loaded, too."""
    get_manifest_path(run, 9999999999999999).touch()
    with ReplayMemory.load(run) as memory:
        assert memory.next_id == 120 * LANES
        grow(memory, 3)
        assert memory.save(run).result().number == 3
        grow(memory, 3)
        assert memory.save(run).result().number == 4
    assert load_ticks(run) == 126


def test_a_save_after_the_highest_number_is_refused(run: Path) -> None:
    """A manifest with a longer number would never be read."""
    words = json.loads(strip_checksum(get_manifest_path(run, 2).read_bytes())) | {"number": 9999999999999999}
    get_manifest_path(run, 9999999999999999).write_bytes(append_checksum(json.dumps(words).encode()))
    with make_memory() as memory:
        grow(memory, 3)
        with pytest.raises(CheckpointError, match="Save to another place"):
            memory.save(run).result()
    assert load_ticks(run) == 120


# ---------------------------------------------------------------- damage, bad sectors, permissions, newer formats


@pytest.fixture
def bad_sectors(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return a set of paths. Reading a file in it fails with EIO, as reading the first page of /proc/self/mem does."""
    if not Path("/proc/self/mem").exists():
        pytest.skip("needs /proc")
    bad: set[Path] = set()
    opened = FileSystem.open

    def open_or_fail(own: FileSystem, path: Path) -> int:
        if path not in bad:
            return opened(own, path)
        file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file, 1, 0)
        return file

    monkeypatch.setattr(FileSystem, "open", open_or_fail)
    return bad


def test_an_unreadable_sector_affects_one_checkpoint(
    run: Path, bad_sectors: set[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The previous checkpoint is loaded with a warning, and `verify` reports damage."""
    for victim in [*find_own_files(run, 2), get_manifest_path(run, 2)]:
        bad_sectors.clear()
        bad_sectors.add(victim)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "holdall"):
            assert load_ticks(run) == 60
        assert "Input/output error" in caplog.text
        refusal = run_command("verify", run)
        assert refusal.exit_code == 3
        assert "Input/output error" in refusal.output
        assert run_command("ls", run).exit_code == 0
        with ReplayMemory.load(run, recover=True) as memory:
            assert len(memory) >= 60 * LANES
            every = np.arange(memory.first_id, memory.next_id)
            require_right(memory, every[memory.are_valid(every)])


def test_an_unreadable_manifest_is_not_removed(run: Path, bad_sectors: set[Path]) -> None:
    """The disk may work again later, and the files of this manifest are not known."""
    bad_sectors.add(get_manifest_path(run, 2))
    with ReplayMemory.load(run) as memory:
        grow(memory, 1)
        memory.save(run, keep=1).result()
    assert get_manifest_path(run, 2).exists()
    bad_sectors.clear()
    get_manifest_path(run, 3).unlink()
    assert load_ticks(run) == 120


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Run the block as a user who may only read what every user may read."""
    if os.name != "posix":
        pytest.skip("needs users")
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_run(run: Path) -> Iterator[Path]:
    """Return a copy of the checkpoints in a folder that every user may read. pytest's own folders are not readable."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(shutil.copytree(run, Path(folder) / "run"))
        with another_user():
            may_look = os.access(copy, os.R_OK | os.X_OK, effective_ids=True)
        if not may_look:
            pytest.skip("needs a folder for temporary files that every user may look into")
        yield copy


@pytest.mark.parametrize("recover", [False, True])
def test_a_missing_permission_is_an_error_and_no_older_checkpoint_is_loaded(open_run: Path, recover: bool) -> None:
    """Otherwise, a user might not notice that half of the transitions are missing."""
    run = open_run
    assert load_ticks(run, recover=recover) == 120
    # These commands also import all modules, which another user may not be able to read.
    assert run_command("verify", run).exit_code == 0
    assert run_command("ls", run).exit_code == 0
    for victim in [get_manifest_path(run, 2), find_own_files(run, 2)[0], run / "segments", run / "manifests"]:
        mode = stat.S_IMODE(victim.stat().st_mode)
        victim.chmod(0)
        try:
            with another_user(), pytest.raises(CheckpointError, match="ermission") as refusal:
                ReplayMemory.load(run, recover=recover)
            assert victim.name in str(refusal.value)
            assert refusal.value.errno in (errno.EACCES, errno.EPERM)
            with another_user():
                verified = run_command("verify", run)
                assert verified.exit_code == 1
                assert "ermission" in verified.output
                assert run_command("ls", run).exit_code in (0, 1)
        finally:
            victim.chmod(mode)
    assert load_ticks(run, recover=recover) == 120


def test_too_many_open_files_is_an_error_and_no_older_checkpoint_is_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is not damaged."""
    opened = FileSystem.open
    victims = find_own_files(run, 2)

    def open_or_fail(own: FileSystem, path: Path) -> int:
        if path in victims:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(own, path)

    monkeypatch.setattr(FileSystem, "open", open_or_fail)
    for recover in (False, True):
        with pytest.raises(CheckpointError, match="Too many open files"):
            ReplayMemory.load(run, recover=recover)


def mark_as_newer(path: Path, **words: Any) -> bytes:
    """Change a manifest to one of a newer version. Return its bytes."""
    raw = append_checksum(json.dumps(json.loads(strip_checksum(path.read_bytes())) | words).encode())
    path.write_bytes(raw)
    return raw


@pytest.mark.parametrize("words", [{"version": 2}, {"features": ["encrypted"]}])
@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_of_a_newer_format_is_neither_removed_nor_ignored(
    run: Path, number: int, words: dict[str, Any]
) -> None:
    """Neither a save nor gc removes it or files that it may name."""
    with ReplayMemory.load(run) as memory:
        raw = mark_as_newer(get_manifest_path(run, number), **words)
        files = sorted(path.name for path in (run / "segments").iterdir())
        for _ in range(4):
            grow(memory, 1)
            with contextlib.suppress(DamageError):
                memory.save(run, keep=1).result()
    assert get_manifest_path(run, number).read_bytes() == raw
    assert run_command("gc", run, "--keep", 1).exit_code == 1
    assert get_manifest_path(run, number).read_bytes() == raw
    assert {path.name for path in (run / "segments").iterdir()} >= set(files)
    if number == 2:
        for recover in (False, True):
            with pytest.raises(DamageError, match="Upgrade"):
                ReplayMemory.load(run, recover=recover)
        with make_memory() as memory, pytest.raises(DamageError, match="Upgrade"):
            memory.save(run).result()
    assert "Upgrade" in run_command("verify", run).output


def test_recover_loads_an_older_checkpoint_if_the_newest_has_no_readable_transition(tmp_path: Path) -> None:
    """All segments of the newest checkpoint are damaged."""
    run = tmp_path / "run"
    for ticks in (60, 100):
        with make_memory() as memory:
            grow(memory, ticks)
            memory.save(run).result()
    reader = open_reader(run)
    for ref in [segment.ref for segment in reader.manifest(2).segments]:
        assert ref not in reader.manifest(1).refs
        path = run / "segments" / ref.file
        raw = bytearray(path.read_bytes())
        raw[ref.start + ref.nbytes - 1] ^= 1
        path.write_bytes(raw)
    with ReplayMemory.load(run, recover=True) as memory:
        assert len(memory) == 60 * LANES
        require_right(memory)
    get_manifest_path(run, 1).unlink()
    with pytest.raises(CheckpointError, match="No transition is readable"):
        ReplayMemory.load(run, recover=True)


def _make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


TRAPS = {
    "fifo": os.mkfifo if hasattr(os, "mkfifo") else None,
    "socket": _make_socket,
    "folder": Path.mkdir,
    "link": _make_link,
}


@posix
@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", TRAPS)
def test_a_special_file_is_damage_and_is_never_waited_for(run: Path, trap: str) -> None:
    """The rule holds for manifests and for data files. A save still works."""
    make: Any = TRAPS[trap]
    for victim, left in ((get_manifest_path(run, 2), 60), (find_own_files(run, 2)[0], 60)):
        raw = victim.read_bytes()
        victim.unlink()
        make(victim)
        for recover in (False, True):
            assert load_ticks(run, recover=recover) == left
        is_hidden = trap == "folder" and victim.parent.name == "manifests"
        assert run_command("verify", run).exit_code == (0 if is_hidden else 3)
        assert run_command("ls", run).exit_code == 0
        victim.rmdir() if trap == "folder" else victim.unlink()
        victim.write_bytes(raw)
    victim = get_manifest_path(run, 2)
    victim.unlink()
    make(victim)
    with ReplayMemory.load(run) as memory:
        grow(memory, 7)
        memory.save(run, keep=1).result()
    assert load_ticks(run) == 67
