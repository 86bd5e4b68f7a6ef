"""Journals: every acknowledged segment is read again, and a shard that lost its journal acknowledges nothing more.

A zombie is a shard that was taken for dead and whose journal another shard, the owner, has taken over.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from holdall.checkpoint.blobs import open_blobs
from holdall.checkpoint.directory_blobs import DirectoryBlobs, FileSystem
from holdall.cluster.journal import Entry, Journal, JournalState, Run, open_journal
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import CheckpointError, DamageError, FencedError

ANN = b"a" * 16
BEN = b"b" * 16


def make_entry(writer: bytes, sequence: int, nbytes: int = 100) -> Entry:
    return Entry(writer, sequence, bytes([sequence % 256]) * nbytes)


def open_and_read(folder: Path) -> tuple[Journal, list[Entry]]:
    journal = open_journal(str(folder), 0, ClusterTuning())
    return journal, [entry for page in journal.open() for entry in page.entries]


def test_appended_segments_are_read_in_order(tmp_path: Path) -> None:
    journal, found = open_and_read(tmp_path)
    assert (found, journal.epoch, journal.expected) == ([], 0, {})
    first = [make_entry(ANN, 0), make_entry(BEN, 0), make_entry(ANN, 1)]
    second = [make_entry(ANN, 2)]
    journal.append(first, 0)
    journal.append(second, 3)
    again, found = open_and_read(tmp_path)
    assert found == first + second
    assert again.expected == {ANN: 3, BEN: 1}
    assert again.epoch > journal.epoch


def test_a_zombie_writes_nothing_more(tmp_path: Path) -> None:
    zombie, _ = open_and_read(tmp_path)
    zombie.append([make_entry(ANN, 0)], 0)
    owner, _ = open_and_read(tmp_path)
    with pytest.raises(FencedError, match="another shard has opened"):
        zombie.append([make_entry(ANN, 1)], 1)
    owner.append([make_entry(ANN, 1)], 1)
    with pytest.raises(FencedError):
        zombie.append([make_entry(ANN, 2)], 2)
    assert open_and_read(tmp_path)[1] == [make_entry(ANN, 0), make_entry(ANN, 1)]


def test_the_owner_reads_what_a_zombie_writes_during_the_takeover(tmp_path: Path) -> None:
    zombie, _ = open_and_read(tmp_path)
    zombie.append([make_entry(ANN, 0)], 0)
    owner = open_journal(str(tmp_path), 0, ClusterTuning())
    taking_over = owner.open()
    found = next(taking_over).entries
    zombie.append([make_entry(ANN, 1)], 1)  # The owner has listed the slots already.
    assert found + [each for page in taking_over for each in page.entries] == [make_entry(ANN, 0), make_entry(ANN, 1)]
    with pytest.raises(FencedError):
        zombie.append([make_entry(ANN, 2)], 2)


def test_one_of_two_shards_that_take_over_at_the_same_time_is_fenced(tmp_path: Path) -> None:
    """Also if both write the same content, because a slot names its owner."""
    first, second = (open_journal(str(tmp_path), 0, ClusterTuning()) for _ in range(2))
    assert first._create([], is_full=True)
    assert not second._create([], is_full=True)


def test_a_zombie_stays_fenced_when_the_owner_has_deleted_old_slots(tmp_path: Path) -> None:
    zombie, _ = open_and_read(tmp_path)
    zombie.append([make_entry(ANN, 0)], 0)
    owner, _ = open_and_read(tmp_path)
    for number in range(1, 200):
        owner.append([make_entry(ANN, number)], number)
        owner.trim(number)
    assert len(list(open_blobs(tmp_path).list("journal/00000/"))) < 100
    with pytest.raises(FencedError):
        zombie.append([make_entry(BEN, 0)], 1)


def test_deleting_old_slots_forgets_no_writer(tmp_path: Path) -> None:
    journal, _ = open_and_read(tmp_path)
    journal.append([make_entry(BEN, 0)], 0)
    for number in range(150):
        journal.append([make_entry(ANN, number)], 1 + number)
        journal.trim(1 + number - 10)
    again = open_journal(str(tmp_path), 0, ClusterTuning())
    pages = list(again.open())
    found = [each for page in pages for each in page.entries]
    assert again.expected == {ANN: 150, BEN: 1}
    assert [each.sequence for each in found][-10:] == list(range(140, 150))
    assert [page.first_row for page in pages] == [1 + each.sequence for each in found]
    assert [page.is_first for page in pages] == [True] + [False] * (len(pages) - 1)


def test_the_owner_reads_again_if_a_zombie_deletes_slots_during_the_takeover(tmp_path: Path) -> None:
    zombie, _ = open_and_read(tmp_path)
    for number in range(100):
        zombie.append([make_entry(ANN, number)], number)
    owner = open_journal(str(tmp_path), 0, ClusterTuning())
    pages = owner.open()
    first = [next(pages) for _ in range(10)]
    assert [page.first_row for page in first] == list(range(10))
    zombie.append([make_entry(ANN, 100)], 100)
    zombie.trim(60)  # The owner has listed some of these slots and not read them.
    rest = list(pages)
    assert [page.is_first for page in rest] == [True] + [False] * (len(rest) - 1)
    assert [page.first_row for page in rest] == list(range(60, 101))
    assert [each for page in rest for each in page.entries] == [make_entry(ANN, number) for number in range(60, 101)]
    assert owner.expected == {ANN: 101}
    with pytest.raises(FencedError):
        zombie.append([make_entry(ANN, 101)], 101)
    owner.append([make_entry(ANN, 101)], 101)


def test_the_state_is_read_again(tmp_path: Path) -> None:
    journal, _ = open_and_read(tmp_path)
    journal.set_state(first_row=256)
    again, _ = open_and_read(tmp_path)
    assert again.state == JournalState(256, "")
    again.state = replace(again.state, loading="place:3")
    again.append([make_entry(ANN, 0)], 0)
    third, _ = open_and_read(tmp_path)
    assert third.state == JournalState(256, "place:3")
    third.set_state(loading="", first_row=5)
    assert open_and_read(tmp_path)[0].state == JournalState(5, "")


def test_the_run_of_a_loaded_segment_is_read_again(tmp_path: Path) -> None:
    journal, _ = open_and_read(tmp_path)
    loaded = make_entry(ANN, 0)._replace(run=Run(BEN.hex(), 7, 3))
    journal.append([loaded], 0)
    assert open_and_read(tmp_path)[1] == [loaded]


def test_a_damaged_slot_is_refused(tmp_path: Path) -> None:
    journal, _ = open_and_read(tmp_path)
    journal.append([make_entry(ANN, 0)], 0)
    path = tmp_path / "journal" / "00000" / "0000000000000001.slot"
    content = path.read_bytes()
    for damaged in (content[:-1], b"", content[:200] + b"\xff" + content[201:]):
        path.write_bytes(damaged)
        with pytest.raises(DamageError):
            open_and_read(tmp_path)


class StubbornDisk(FileSystem):
    """A disk that deletes no slot while `is_stubborn`."""

    is_stubborn = False

    def unlink(self, path: Path) -> None:
        if self.is_stubborn and path.suffix == ".slot":
            raise OSError(errno.EIO, "Input/output error")
        super().unlink(path)


def test_a_slot_that_cannot_be_deleted_is_deleted_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The segments are durable already, so neither writers nor the thread that writes priorities may get an error."""
    disk = StubbornDisk()
    journal = Journal(DirectoryBlobs(tmp_path, disk), 0, ClusterTuning(full_slot_interval=1))
    list(journal.open())
    for number in range(10):
        journal.append([make_entry(ANN, number)], number)
    slots = tmp_path / "journal" / "00000"
    count = len(list(slots.iterdir()))
    disk.is_stubborn = True
    with caplog.at_level(logging.WARNING, "holdall"):
        journal.trim(5)
    assert "deleted later" in caplog.text
    assert len(list(slots.iterdir())) == count
    assert open_and_read(tmp_path)[1] == [make_entry(ANN, number) for number in range(10)]
    disk.is_stubborn = False
    journal.trim(5)
    assert open_and_read(tmp_path)[1] == [make_entry(ANN, number) for number in range(5, 10)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_without_permission_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be"):
        open_and_read(tmp_path / "below")
