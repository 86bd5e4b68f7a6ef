"""A flipped, cut or zeroed byte is noticed. It costs at most one block, and no row is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import CheckpointError, HoldallError, ReplayMemory
from holdall.checkpoint import open_reader
from holdall.checkpoint.load import RecordFiles
from holdall.checkpoint.manifest import Ref
from holdall.store.tuning import Tuning

from .nursery import LANES, SPACE, TUNING, add, require_right

TICKS = 90
MAX_LOST_WITH_A_UNIT = 80
"""A unit has up to 16 frames, and each of them is part of five observations."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint with several segments, blocks, a state and an attached file."""
    folder = tmp_path_factory.mktemp("damage")
    with ReplayMemory(SPACE, spaces.Discrete(5), TICKS * LANES, LANES, budget=None, seed=1, _tuning=TUNING) as memory:
        for tick in range(TICKS):
            add(memory, tick)
        memory.save(folder / "run", attach={"agent": b"weights" * 9}).result()
    return folder / "run"


def list_regions(run: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield a file, a byte and the name of its part: both ends and the middle of every part of every record."""
    manifest = open_reader(run).manifest(1)
    shelf = RecordFiles(open_reader(run), manifest.files)
    for ref in dict.fromkeys(manifest.refs):
        record, ahead = shelf.read_record(ref)
        path = ahead.file.path
        for place, what in _list_head_bytes(ref, record.head_bytes):
            yield path, place, f"{record.kind} {what}"
        for name, part in record.arrays.items():
            for place in {part.start, part.start + part.nbytes // 2, part.start + part.nbytes - 1}:
                if part.nbytes:
                    yield path, place, f"{record.kind} {name}"
    newest = run / "manifests" / "0000000000000001.json"
    for place in range(0, newest.stat().st_size, 7):
        yield newest, place, "manifest"


def _list_head_bytes(ref: Ref, head_bytes: int) -> Iterator[tuple[int, str]]:
    for place in (0, 7, 8, 12, 16, 24, 28, 31):
        yield ref.start + place, "preamble"
    for place in (32, 32 + (head_bytes - 32) // 2, head_bytes - 1):
        yield ref.start + place, "head"


def is_noticed(run: Path) -> bool:
    """Return whether loading or reading raises an error. A wrong row fails the test."""
    try:
        memory = ReplayMemory.load(run)
    except HoldallError:
        return True
    lost = 0
    with memory:
        try:
            if memory.attached["agent"] != b"weights" * 9:
                pytest.fail("an attached file is not what was saved")
            require_right(memory)
        except HoldallError:
            for tick in range(TICKS):
                try:
                    memory.gather(np.arange(LANES) + tick * LANES)
                except HoldallError:
                    lost += 1
            assert lost < TICKS / 2, "more than one block is lost"
            return True
    return False


@pytest.mark.parametrize("harm", ["flip", pytest.param("zero", marks=pytest.mark.nightly)])
def test_every_changed_byte_is_noticed(saved: Path, harm: str) -> None:
    """A byte is changed in every region of every kind of file."""
    unnoticed = []
    seen = set()
    for path, place, what in list_regions(saved):
        raw = path.read_bytes()
        changed = bytearray(raw)
        changed[place] = 0 if harm == "zero" else changed[place] ^ 0x40
        if changed == raw:
            continue
        path.write_bytes(changed)
        try:
            if not is_noticed(saved):
                unnoticed.append(f"byte {place}: {what}")
        finally:
            path.write_bytes(raw)
        seen.add(what.split()[0])
    assert not unnoticed, unnoticed
    assert seen >= {"segment", "block", "state", "file", "manifest"}
    with ReplayMemory.load(saved) as memory:
        require_right(memory)


@pytest.mark.parametrize("every_nth", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_all_but_one_damaged_record_is_recovered(saved: Path, every_nth: int) -> None:
    """Transitions that do not need the damaged record are loaded, and are right."""
    recovered = set()
    damaged = [region for region in list_regions(saved) if region[2].split()[0] in {"segment", "block"}]
    for path, place, what in damaged[::every_nth]:
        kind = what.split()[0]
        raw = path.read_bytes()
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x40]) + raw[place + 1 :])
        try:
            with ReplayMemory.load(saved, recover=True) as memory:
                every = np.arange(memory.first_id, memory.next_id)
                left = every[memory.are_valid(every)]
                assert len(memory) == len(left)
                require_right(memory, left)
                assert TICKS * LANES / 3 < len(left) < TICKS * LANES, what
                if what == "block units":
                    assert len(left) >= TICKS * LANES - MAX_LOST_WITH_A_UNIT
        finally:
            path.write_bytes(raw)
        recovered.add(kind)
    assert recovered == {"segment", "block"}
    with ReplayMemory.load(saved, recover=True) as memory:
        assert len(memory) == TICKS * LANES
        require_right(memory)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


LOSSES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a folder": _replace_by_folder,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_transitions_outside_of_a_lost_file_are_recovered(
    loss: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All checkpoints name the file, so none is whole. The other transitions of the newest one are loaded."""
    with ReplayMemory(SPACE, spaces.Discrete(5), TICKS * LANES, LANES, budget=None, seed=1, _tuning=TUNING) as memory:
        for ticks in (TICKS // 2, TICKS):
            for tick in range(memory.next_id // LANES, ticks):
                add(memory, tick)
            memory.save(tmp_path / "run").result()
    reader = open_reader(tmp_path / "run")
    kept = []
    for name in sorted(set(reader.manifest(1).files) & set(reader.manifest(2).files)):
        run = shutil.copytree(tmp_path / "run", tmp_path / name)
        LOSSES[loss](run / "segments" / name)
        with pytest.raises(HoldallError, match=name):
            ReplayMemory.load(run)
        caplog.clear()
        with ReplayMemory.load(run, recover=True) as memory:
            every = np.arange(memory.first_id, memory.next_id)
            left = every[memory.are_valid(every)]
            assert len(every) == TICKS * LANES
            assert len(memory) == len(left) < len(every)
            require_right(memory, left)
        assert "are lost" in caplog.text
        assert name in caplog.text
        kept.append(len(left))
    assert max(kept) > TICKS * LANES / 4


PICTURES = np.random.default_rng(0).integers(0, 256, (16, 36, 36), np.uint8)
"""Noise that many frames have in common, so that a dictionary is trained."""
PICTURE_TICKS = 300
"""Ticks that are added before each save. They fill a segment."""


def stack_pictures(tick: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the observation of a tick: two frames, each one of the pictures with four rows of new noise."""
    frames = []
    for seed in (max(0, tick - 1), tick):
        generator = np.random.default_rng(seed)
        frame = generator.integers(0, 256, PICTURES.shape[1:], np.uint8)
        frame[4:] = PICTURES[generator.integers(len(PICTURES)), 4:]
        frames.append(frame)
    return np.stack(frames)[None]


def save_pictures(run: Path) -> None:
    """Save three checkpoints, each with one segment more, whose blocks are compressed with a dictionary."""
    space = spaces.Box(0, 255, (2, 36, 36), np.uint8)
    no = np.zeros(1, np.bool_)
    tuning = Tuning(block_bytes=200_000)
    with ReplayMemory(space, spaces.Discrete(2), 1000, budget=None, seed=1, _tuning=tuning) as memory:
        for number in range(3):
            for tick in range(PICTURE_TICKS * number, PICTURE_TICKS * (number + 1)):
                memory.add(stack_pictures(tick), np.zeros(1, int), np.zeros(1), stack_pictures(tick + 1), no, no)
            memory.store.wait_idle()
            memory.save(run).result()


def require_pictures(memory: ReplayMemory, ids: Any) -> None:
    """Compare transitions with those that were added."""
    batch = memory.gather(ids)
    assert np.array_equal(batch.obs, np.concatenate([stack_pictures(tick) for tick in ids]))
    assert np.array_equal(batch.next_obs, np.concatenate([stack_pictures(tick + 1) for tick in ids]))


def spoil_dictionaries(run: Path, number: int) -> None:
    """Change a byte in every dictionary of a checkpoint."""
    refs = open_reader(run).manifest(number).dictionaries.values()
    assert refs
    for ref in refs:
        path = run / "segments" / ref.file
        raw = bytearray(path.read_bytes())
        raw[ref.start + ref.nbytes // 2] ^= 1
        path.write_bytes(raw)


def test_a_damaged_dictionary_affects_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`load` returns the checkpoint before. `recover=True` uses the dictionary of another checkpoint."""
    save_pictures(tmp_path)
    spoil_dictionaries(tmp_path, 3)
    with ReplayMemory.load(tmp_path) as memory:
        assert len(memory) == 2 * PICTURE_TICKS
        require_pictures(memory, np.arange(2 * PICTURE_TICKS))
    caplog.clear()
    with ReplayMemory.load(tmp_path, recover=True) as memory:
        assert len(memory) == 3 * PICTURE_TICKS
        require_pictures(memory, np.arange(3 * PICTURE_TICKS))
    assert not caplog.records


def test_losses_with_one_reason_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The dictionaries of all checkpoints are damaged, so several consecutive segments are lost."""
    save_pictures(tmp_path)
    for number in (1, 2, 3):
        spoil_dictionaries(tmp_path, number)
    with ReplayMemory.load(tmp_path, recover=True) as memory:
        ids = np.arange(3 * PICTURE_TICKS)
        left = ids[memory.are_valid(ids)]
        require_pictures(memory, left)
        lost = len(ids) - len(left)
    assert len(open_reader(tmp_path).manifest(3).segments) > 3
    assert lost > PICTURE_TICKS
    assert len(caplog.records) == 1
    assert f": {lost} transitions of ticks " in caplog.text


def test_evicted_transitions_do_not_count_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The oldest segment that a full memory holds begins with ticks that were evicted."""
    with ReplayMemory(SPACE, spaces.Discrete(5), 50 * LANES, LANES, budget=None, seed=1, _tuning=TUNING) as memory:
        for tick in range(70):
            add(memory, tick)
        memory.save(tmp_path).result()
    manifest = open_reader(tmp_path).manifest(1)
    damaged = next(entry for entry in manifest.segments if entry.first_tick + entry.ticks > manifest.first_tick)
    assert damaged.first_tick < manifest.first_tick
    path = tmp_path / "segments" / damaged.ref.file
    raw = bytearray(path.read_bytes())
    raw[damaged.ref.start] ^= 1
    path.write_bytes(raw)
    with ReplayMemory.load(tmp_path, recover=True) as memory:
        lost = memory.next_id - memory.first_id - len(memory)
    assert lost == (damaged.first_tick + damaged.ticks - manifest.first_tick) * LANES
    assert f": {lost} transitions of ticks {manifest.first_tick} to " in caplog.text


def test_a_reason_that_several_checkpoints_share_is_given_once(tmp_path: Path) -> None:
    """All three checkpoints name the first segment."""
    with ReplayMemory(SPACE, spaces.Discrete(5), TICKS * LANES, LANES, budget=None, seed=1, _tuning=TUNING) as memory:
        for tick in range(TICKS):
            add(memory, tick)
            if tick % 30 == 29:
                memory.save(tmp_path / "run").result()
    ref = open_reader(tmp_path / "run").manifest(3).segments[0].ref
    path = tmp_path / "run" / "segments" / ref.file
    raw = bytearray(path.read_bytes())
    raw[ref.start] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as refusal:
        ReplayMemory.load(tmp_path / "run")
    assert str(refusal.value).count(path.name) == 1


def test_every_cut_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    """A checkpoint with a cut file is not loaded."""
    for path in [*(saved / "segments").iterdir(), *(saved / "manifests").iterdir()]:
        size = path.stat().st_size
        for length in (0, 1, size // 2, size - 1):
            run = tmp_path / f"{path.name}-{length}"
            shutil.copytree(saved, run)
            victim = run / path.relative_to(saved)
            victim.write_bytes(path.read_bytes()[:length])
            with pytest.raises(HoldallError):
                ReplayMemory.load(run)


def test_a_missing_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    """The error names the file."""
    for path in (saved / "segments").iterdir():
        run = tmp_path / path.name
        shutil.copytree(saved, run)
        (run / "segments" / path.name).unlink()
        with pytest.raises(HoldallError, match=path.name):
            ReplayMemory.load(run)


def test_bytes_after_the_end_of_a_file_change_nothing(saved: Path, tmp_path: Path) -> None:
    """The manifest has the places of all records. The checkpoint is loaded and saved again."""
    for path in (saved / "segments").iterdir():
        run = tmp_path / path.name
        shutil.copytree(saved, run)
        with (run / "segments" / path.name).open("ab") as file:
            file.write(b"more")
        for _ in range(2):
            with ReplayMemory.load(run) as memory:
                assert len(memory) == TICKS * LANES
                require_right(memory)
                memory.save(run).result()
