"""A directory that others change, break or fill with traps: nothing acknowledged is lost, nothing of theirs goes."""

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

from .nursery import LANES, SPACE, TUNING, add, require_right

posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX file system")


def new_memory(capacity_ticks: int = 4000, tuning: Tuning | None = None) -> ReplayMemory:
    """Return a memory whose ticks are in one segment, unless `tuning` says otherwise."""
    return ReplayMemory(SPACE, spaces.Discrete(5), capacity_ticks * LANES, LANES, budget=None, seed=1, _tuning=tuning)


def grow(memory: ReplayMemory, ticks: int) -> None:
    for _ in range(ticks):
        add(memory, memory.next_id // LANES)


def manifest(run: Path, number: int) -> Path:
    return run / "manifests" / f"{number:016d}.json"


def ticks_of(run: Path, **settings: Any) -> int:
    """Load, compare every row, and return how many ticks there are."""
    with ReplayMemory.load(run, **settings) as loaded:
        require_right(loaded)
        return int(loaded.next_id) // LANES


def only_in(run: Path, number: int) -> list[Path]:
    """Return the files that one checkpoint alone names."""
    reader = open_reader(run)
    others = {name for other in reader.numbers() if other != number for name in reader.manifest(other).files}
    return [run / "segments" / name for name in reader.manifest(number).files if name not in others]


def called(*words: Any) -> Any:
    result = CliRunner().invoke(checkpoint, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, of 60 ticks and of 120."""
    with new_memory() as memory:
        for _ in range(2):
            grow(memory, 60)
            memory.save(tmp_path / "run").result()
    return tmp_path / "run"


# What is another's stays.


def test_files_of_others_stay_whatever_they_are_called(run: Path) -> None:
    """Not even what ends like one of holdall's temporary files."""
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
    called("gc", run, "--keep", 1)
    assert [path.read_bytes() for path in theirs] == [b"mine"] * len(theirs)
    assert ticks_of(run) == 123


def test_what_a_dead_writer_left_under_temporary_names_is_removed(run: Path) -> None:
    """The next writer that takes the lock removes it."""
    names = [
        f"segments/{'a' * 16}-{'0' * 16}.seg.{'b' * 16}.tmp",
        f"segments/{'a' * 16}-{'0' * 16}.seg",
        f"manifests/{9:016d}.json.{'a' * 16}.tmp",
    ]
    for name in names:
        (run / name).write_bytes(b"half")
    called("gc", run)
    assert not any((run / name).exists() for name in names)
    assert ticks_of(run) == 120


@posix
@pytest.mark.parametrize("folder", ["manifests", "segments"])
def test_a_folder_that_is_a_link_is_refused(run: Path, tmp_path: Path, folder: str) -> None:
    """Nothing behind it is read as a checkpoint, and nothing is removed."""
    (run / folder).rename(tmp_path / "elsewhere")
    stray = tmp_path / "elsewhere" / f"{'a' * 16}-{'0' * 16}.seg.tmp"
    stray.write_bytes(b"mine")
    os.utime(stray, (0, 0))
    (run / folder).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    with pytest.raises(HoldallError, match=rf"{folder}.* is a link"):
        ReplayMemory.load(run)
    with new_memory() as memory, pytest.raises(HoldallError, match=rf"{folder}.* is a link"):
        memory.save(run).result()
    for command in ("ls", "verify", "gc"):
        assert called(command, run).exit_code == 1
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == before


@posix
def test_a_link_in_place_of_a_file_is_not_followed(run: Path, tmp_path: Path) -> None:
    """It counts as damage. A save leaves both it and its target alone."""
    victim = only_in(run, 2)[0]
    victim.rename(tmp_path / "target")
    victim.symlink_to(tmp_path / "target")
    assert ticks_of(run) == 60
    assert called("verify", run).exit_code == 3
    with ReplayMemory.load(run) as memory:
        memory.save(run, keep=1).result()
    assert (tmp_path / "target").stat().st_size > 0


@posix
def test_a_lock_that_is_a_link_does_not_make_its_target(run: Path, tmp_path: Path) -> None:
    """Nor is a file locked that is another's."""
    (run / "LOCK").unlink()
    (run / "LOCK").symlink_to(tmp_path / "made")
    with new_memory() as memory, pytest.raises(DamageError, match="LOCK"):
        memory.save(run).result()
    assert not (tmp_path / "made").exists()
    (run / "LOCK").unlink()
    os.mkfifo(run / "LOCK")
    with new_memory() as memory, pytest.raises(DamageError, match="LOCK"):
        memory.save(run).result()


# What is acknowledged can be loaded.


def test_files_that_vanished_are_written_again(tmp_path: Path) -> None:
    """The checkpoint that follows holds everything."""
    with new_memory() as memory:
        grow(memory, 200)
        memory.save(tmp_path).result()
        for path in [*(tmp_path / "segments").iterdir(), *(tmp_path / "manifests").iterdir()]:
            path.unlink()
        grow(memory, 5)
        memory.save(tmp_path).result()
        assert ticks_of(tmp_path) == 205
        victim = max((tmp_path / "segments").iterdir(), key=lambda path: path.stat().st_size)
        victim.write_bytes(victim.read_bytes()[:-1])
        grow(memory, 5)
        with contextlib.suppress(CheckpointError):  # its name is there; the commit finds that its bytes are not
            memory.save(tmp_path).result()
        memory.save(tmp_path).result()
    assert ticks_of(tmp_path) == 210


def test_a_file_that_vanishes_during_a_save_fails_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not acknowledged, the error names the file, and the next save writes everything again."""
    with new_memory(tuning=TUNING) as memory:
        grow(memory, 200)
        memory.save(tmp_path).result()
        victim = max((tmp_path / "segments").iterdir(), key=lambda path: path.stat().st_size)
        create = FileSystem.create

        def creating(own: FileSystem, path: Path) -> int:
            victim.unlink(missing_ok=True)
            return create(own, path)

        grow(memory, 5)
        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, "create", creating)
            with pytest.raises(CheckpointError, match=victim.name):
                memory.save(tmp_path).result()
        grow(memory, 5)
        memory.save(tmp_path).result()
    assert ticks_of(tmp_path) == 210


def test_only_whole_checkpoints_count_for_keep(run: Path) -> None:
    """What is left of the newest does not push out the one that can be loaded."""
    only_in(run, 2)[0].unlink()
    called("gc", run, "--keep", 1)
    assert ticks_of(run) == 60
    with ReplayMemory.load(run) as memory:
        memory.save(run, keep=1).result()
    assert ticks_of(run) == 60
    assert not manifest(run, 2).exists()


@posix
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_directory_that_was_removed_works_again_at_the_next_save(tmp_path: Path, is_made_again: bool) -> None:
    """Whether somebody made it again or not. The old lock counts no more."""
    with new_memory() as memory:
        for ticks in (100, 103, 106):
            grow(memory, ticks - memory.next_id // LANES)
            memory.save(tmp_path / "run").result()
            assert ticks_of(tmp_path / "run") == ticks
            shutil.rmtree(tmp_path / "run")
            if is_made_again:
                (tmp_path / "run").mkdir()
        grow(memory, 4)
        memory.save(tmp_path / "run").result()
        with new_memory() as other, pytest.raises(FencedError):
            other.save(tmp_path / "run").result()
    assert ticks_of(tmp_path / "run") == 110


@posix
def test_a_directory_that_is_removed_during_a_save_fails_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call finds it gone."""
    with new_memory() as memory:
        grow(memory, 60)
        memory.save(tmp_path / "run").result()
        for call in ("create", "write", "link", "sync_directory"):
            method = getattr(FileSystem, call)

            def removing(own: FileSystem, *arguments: Any, method: Any = method) -> Any:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                return method(own, *arguments)

            grow(memory, 3)
            with monkeypatch.context() as patch:
                patch.setattr(FileSystem, call, removing)
                with pytest.raises(CheckpointError):
                    memory.save(tmp_path / "run").result()
            memory.save(tmp_path / "run").result()
            assert ticks_of(tmp_path / "run") == memory.next_id // LANES


@posix
def test_a_writer_whose_directory_another_one_has_now_stops(tmp_path: Path) -> None:
    """It was removed and made again by somebody who saves to it."""
    with new_memory() as first, new_memory() as second:
        grow(first, 20)
        grow(second, 30)
        first.save(tmp_path / "run").result()
        shutil.rmtree(tmp_path / "run")
        second.save(tmp_path / "run").result()
        with pytest.raises(FencedError):
            first.save(tmp_path / "run").result()
        second.save(tmp_path / "run").result()
        assert ticks_of(tmp_path / "run") == 30


def test_a_stray_name_with_the_highest_number_hides_nothing(run: Path) -> None:
    """What is saved beside it is what is loaded."""
    manifest(run, 9999999999999999).touch()
    with ReplayMemory.load(run) as memory:
        assert memory.next_id == 120 * LANES
        grow(memory, 3)
        assert memory.save(run).result().number == 3
        grow(memory, 3)
        assert memory.save(run).result().number == 4
    assert ticks_of(run) == 126


def test_numbers_that_are_used_up_are_an_error(run: Path) -> None:
    """No name is written that no reader looks at."""
    words = json.loads(strip_checksum(manifest(run, 2).read_bytes())) | {"number": 9999999999999999}
    manifest(run, 9999999999999999).write_bytes(append_checksum(json.dumps(words).encode()))
    with new_memory() as memory:
        grow(memory, 3)
        with pytest.raises(CheckpointError, match="Save to another place"):
            memory.save(run).result()
    assert ticks_of(run) == 120


# Damage, unreadable sectors, permission, newer formats: four different things.


@pytest.fixture
def bad_sectors(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths from which nothing can be read: the kernel answers EIO, as it does below every process's first page."""
    if not Path("/proc/self/mem").exists():
        pytest.skip("needs /proc")
    bad: set[Path] = set()
    opened = FileSystem.open

    def opening(own: FileSystem, path: Path) -> int:
        if path not in bad:
            return opened(own, path)
        file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file, 1, 0)
        return file

    monkeypatch.setattr(FileSystem, "open", opening)
    return bad


def test_an_unreadable_sector_costs_one_checkpoint(
    run: Path, bad_sectors: set[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The one before is loaded with a warning, with and without `recover`, and `verify` counts it as damage."""
    for victim in [*only_in(run, 2), manifest(run, 2)]:
        bad_sectors.clear()
        bad_sectors.add(victim)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "holdall"):
            assert ticks_of(run) == 60
        assert "Input/output error" in caplog.text
        told = called("verify", run)
        assert told.exit_code == 3
        assert "Input/output error" in told.output
        assert called("ls", run).exit_code == 0
        with ReplayMemory.load(run, recover=True) as memory:
            assert len(memory) >= 60 * LANES
            every = np.arange(memory.first_id, memory.next_id)
            require_right(memory, every[memory.are_valid(every)])


def test_an_unreadable_manifest_is_not_removed(run: Path, bad_sectors: set[Path]) -> None:
    """The disk may come back, and which files it names is not known."""
    bad_sectors.add(manifest(run, 2))
    with ReplayMemory.load(run) as memory:
        grow(memory, 1)
        memory.save(run, keep=1).result()
    assert manifest(run, 2).exists()
    bad_sectors.clear()
    manifest(run, 3).unlink()
    assert ticks_of(run) == 120


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Be one who may not read what is not given to all."""
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
    """The same two checkpoints where another user may look: not below pytest's own folders, which are closed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(shutil.copytree(run, Path(folder) / "run"))
        with another_user():
            may_look = os.access(copy, os.R_OK | os.X_OK, effective_ids=True)
        if not may_look:
            pytest.skip("needs a folder for temporary files that every user may look into")
        yield copy


@pytest.mark.parametrize("recover", [False, True])
def test_what_may_not_be_read_is_an_error_and_no_older_state(open_run: Path, recover: bool) -> None:
    """Half of the transitions with a line in a log would look like all of them."""
    run = open_run
    assert ticks_of(run, recover=recover) == 120
    assert called("verify", run).exit_code == called("ls", run).exit_code == 0  # all is imported by now
    for victim in [manifest(run, 2), only_in(run, 2)[0], run / "segments", run / "manifests"]:
        mode = stat.S_IMODE(victim.stat().st_mode)
        victim.chmod(0)
        try:
            with another_user(), pytest.raises(CheckpointError, match="ermission") as told:
                ReplayMemory.load(run, recover=recover)
            assert victim.name in str(told.value)
            assert told.value.errno in (errno.EACCES, errno.EPERM)
            with another_user():
                told_again = called("verify", run)
                assert told_again.exit_code == 1
                assert "ermission" in told_again.output
                assert called("ls", run).exit_code in (0, 1)
        finally:
            victim.chmod(mode)
    assert ticks_of(run, recover=recover) == 120


def test_no_file_left_to_open_is_an_error_and_no_older_state(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with the newest checkpoint."""
    opened = FileSystem.open
    victims = only_in(run, 2)

    def opening(own: FileSystem, path: Path) -> int:
        if path in victims:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(own, path)

    monkeypatch.setattr(FileSystem, "open", opening)
    for recover in (False, True):
        with pytest.raises(CheckpointError, match="Too many open files"):
            ReplayMemory.load(run, recover=recover)


def newer(path: Path, **words: Any) -> bytes:
    """Make a manifest one of a version to come. Return its bytes."""
    raw = append_checksum(json.dumps(json.loads(strip_checksum(path.read_bytes())) | words).encode())
    path.write_bytes(raw)
    return raw


@pytest.mark.parametrize("words", [{"version": 2}, {"features": ["encrypted"]}])
@pytest.mark.parametrize("number", [1, 2])
def test_a_newer_format_is_never_removed_nor_passed_over(run: Path, number: int, words: dict[str, Any]) -> None:
    """Neither by a save, nor by gc, and the files that it may name stay."""
    with ReplayMemory.load(run) as memory:
        raw = newer(manifest(run, number), **words)
        files = sorted(path.name for path in (run / "segments").iterdir())
        for _ in range(4):
            grow(memory, 1)
            with contextlib.suppress(DamageError):
                memory.save(run, keep=1).result()
    assert manifest(run, number).read_bytes() == raw
    assert called("gc", run, "--keep", 1).exit_code == 1
    assert manifest(run, number).read_bytes() == raw
    assert {path.name for path in (run / "segments").iterdir()} >= set(files)
    if number == 2:
        for recover in (False, True):
            with pytest.raises(DamageError, match="Upgrade"):
                ReplayMemory.load(run, recover=recover)
        with new_memory() as memory, pytest.raises(DamageError, match="Upgrade"):
            memory.save(run).result()
    assert "Upgrade" in called("verify", run).output


def test_recovering_never_returns_nothing_while_an_older_checkpoint_is_whole(tmp_path: Path) -> None:
    """All segments of the newest are damaged, so the one before is loaded."""
    run = tmp_path / "run"
    for ticks in (60, 100):
        with new_memory() as memory:
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
    manifest(run, 1).unlink()
    with pytest.raises(CheckpointError, match="No transition is readable"):
        ReplayMemory.load(run, recover=True)


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


TRAPS = {"fifo": os.mkfifo if hasattr(os, "mkfifo") else None, "socket": _socket, "folder": Path.mkdir, "link": _link}


@posix
@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", TRAPS)
def test_what_is_no_regular_file_is_damage_and_nobody_waits_for_it(run: Path, trap: str) -> None:
    """As a manifest, as a file of records, and a save works beside it."""
    make: Any = TRAPS[trap]
    for victim, left in ((manifest(run, 2), 60), (only_in(run, 2)[0], 60)):
        raw = victim.read_bytes()
        victim.unlink()
        make(victim)
        for recover in (False, True):
            assert ticks_of(run, recover=recover) == left
        is_hidden = trap == "folder" and victim.parent.name == "manifests"
        assert called("verify", run).exit_code == (0 if is_hidden else 3)
        assert called("ls", run).exit_code == 0
        victim.rmdir() if trap == "folder" else victim.unlink()
        victim.write_bytes(raw)
    victim = manifest(run, 2)
    victim.unlink()
    make(victim)
    with ReplayMemory.load(run) as memory:
        grow(memory, 7)
        memory.save(run, keep=1).result()
    assert ticks_of(run) == 67
