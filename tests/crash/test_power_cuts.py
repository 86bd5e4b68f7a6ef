"""After a power cut at any call the last acknowledged checkpoint is there; every broken protocol is caught."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from holdall.checkpoint.directory import DirectoryWriter
from holdall.checkpoint.manifest import Manifest, encode, manifest_name

from .protocol import KEEP, RUN, OpenPlace, Run, acknowledged, violation
from .simulated import SimulatedDisk, after_power_cuts


def history(
    saves: int, ignored: tuple[tuple[str, str], ...] = (), open_writer: OpenPlace = DirectoryWriter
) -> SimulatedDisk:
    disk = SimulatedDisk(ignored)
    run = Run(disk, open_writer)
    for _ in range(saves):
        run.save()
    run.place.close()
    return disk


def violations(
    disk: SimulatedDisk, most_at_a_cut: int, enough: int | None = None, seed: int = 0
) -> tuple[int, list[str]]:
    states, found = 0, []
    for cut, left in after_power_cuts(disk.calls, most_at_a_cut=most_at_a_cut, seed=seed):
        states += 1
        if told := violation(left, acknowledged(disk.calls[:cut])):
            found.append(f"after {cut} calls: {told}")
            if enough is not None and len(found) >= enough:
                break
    return states, found


def test_no_power_cut_loses_an_acknowledged_checkpoint() -> None:
    """A slice of the states that the nightly run looks at."""
    states, found = violations(history(saves=4), most_at_a_cut=64)
    assert not found, found[:3]
    assert states > 2_000, states


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_no_power_cut_of_a_hundred_thousand_loses_an_acknowledged_checkpoint(seed: int) -> None:
    """More saves, and more of what may be lost at each cut; seeds choose among what is too much to look at."""
    states, found = violations(history(saves=20), most_at_a_cut=450, seed=seed)
    assert not found, found[:3]
    assert states >= 100_000 / 6, states


def recovered(left: SimulatedDisk, seed: int) -> tuple[SimulatedDisk, SimulatedDisk]:
    """Let a new writer open a crashed disk and save twice; return the disk before and after."""
    before = SimulatedDisk()
    before.directories = set(left.directories)
    before.files = dict(left.files)
    run = Run(left, seed=seed)
    run.save()
    run.save()
    run.place.close()
    return before, left


@pytest.mark.parametrize("every", [pytest.param(197, id="some"), pytest.param(7, id="many", marks=pytest.mark.nightly)])
def test_a_writer_that_comes_after_a_crash_may_crash_too(every: int) -> None:
    """Nothing that a dead writer left behind, under names of its own, becomes part of a later checkpoint."""
    disk = history(saves=3)
    looked_at = 0
    for number, (cut, left) in enumerate(after_power_cuts(disk.calls, most_at_a_cut=64)):
        if number % every or not left.directories >= {RUN / "segments", RUN / "manifests"}:
            continue
        promised = acknowledged(disk.calls[:cut])
        before, after = recovered(left, seed=number)
        for second, twice in after_power_cuts(after.calls, before, most_at_a_cut=8, seed=number):
            again = promised + acknowledged(after.calls[:second])
            kept = again if len(again) == len(promised) else again[len(promised) - KEEP :]
            assert not violation(twice, kept[-1:]), (cut, second)
            looked_at += 1
    assert looked_at > 100


class CollectsFirst(DirectoryWriter):
    """Removes what it believes stale before the new checkpoint is there."""

    def commit(self, manifest: Manifest) -> None:
        self.collect(KEEP - 1, manifest.files)
        super().commit(manifest)


class CollectsFilesFirst(DirectoryWriter):
    """Removes files before the manifests that name them."""

    def commit(self, manifest: Manifest) -> None:
        super().commit(manifest)
        for name in self.reader.file_sizes():
            if name not in manifest.files:
                self._disk.unlink(self._segments / name)


class Replaces(DirectoryWriter):
    """Keeps one manifest, takes it away, and puts the next one in its place."""

    def commit(self, manifest: Manifest) -> None:
        for number in self.reader.numbers():
            self._disk.unlink(self._manifests / manifest_name(number))
        super().commit(manifest)


class WritesInPlace(DirectoryWriter):
    """Writes the manifest under its final name, and never syncs its bytes."""

    def commit(self, manifest: Manifest) -> None:
        self._disk.sync_directory(self._segments)
        file = self._disk.create(self._manifests / manifest_name(manifest.number))
        self._disk.write(file, encode(manifest))
        self._disk.close(file)
        self._disk.sync_directory(self._manifests)


MUTANTS: dict[str, tuple[tuple[tuple[str, str], ...], OpenPlace]] = {
    "data files are not synced": ((("sync", "/segments/"),), DirectoryWriter),
    "the directory of data files is not synced": ((("sync_directory", "/segments"),), DirectoryWriter),
    "manifests are not synced": ((("sync", "/manifests/"),), DirectoryWriter),
    "the directory of manifests is not synced": ((("sync_directory", "/manifests"),), DirectoryWriter),
    "new directories are not synced": ((("sync_directory", "/one"), ("sync_directory", "/runs")), DirectoryWriter),
    "collected before the commit": ((), CollectsFirst),
    "files are collected before manifests": ((), CollectsFilesFirst),
    "the last manifest is taken away first": ((), Replaces),
    "manifests are written in place, unsynced": ((), WritesInPlace),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_that_leaves_a_step_out_is_caught(mutant: str) -> None:
    """The simulation finds each of these: it would find the same in the real one."""
    ignored, open_writer = MUTANTS[mutant]
    _, found = violations(history(4, ignored, open_writer), most_at_a_cut=64, enough=1)
    assert found


class CollectsWithoutSync(SimulatedDisk):
    """A disk on which the sync between removing manifests and removing files does not happen."""

    _is_collecting = False

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._is_collecting = path.parent.name == "manifests" and path.suffix == ".json"

    def sync_directory(self, path: Path) -> None:
        if not (self._is_collecting and path.name == "manifests"):
            super().sync_directory(path)
        self._is_collecting = False


def test_collecting_without_a_sync_in_between_is_caught() -> None:
    """A manifest that comes back after a cut must not name files that are gone."""
    disk = CollectsWithoutSync()
    run = Run(disk)
    for _ in range(5):
        run.save()
    _, found = violations(disk, most_at_a_cut=64, enough=1)
    assert found


def test_a_name_used_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an id of its own, a writer that comes after a crash would overwrite files of the checkpoint before."""
    monkeypatch.setattr("holdall.checkpoint.directory.new_writer_id", lambda: "0" * 16)
    disk = history(saves=2)
    promised = acknowledged(disk.calls)
    with contextlib.suppress(FileExistsError):  # a link refuses it, a rename does not
        Run(disk, seed=1).save()
    assert "other bytes" in violation(disk, promised)
