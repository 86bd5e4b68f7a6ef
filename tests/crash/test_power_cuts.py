"""After a power cut at any call, the last acknowledged checkpoint is whole. Broken protocols are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdall.checkpoint.manifest import Manifest, encode, manifest_name
from holdall.checkpoint.reader import MANIFESTS, SEGMENTS
from holdall.checkpoint.retention import collect

from .protocol import KEEP, RUN, Run, find_violation, list_acknowledged
from .simulated import SimulatedDisk, after_power_cuts


def run_saves(saves: int, ignored: tuple[tuple[str, str], ...] = (), kind: type[Run] = Run) -> SimulatedDisk:
    disk = SimulatedDisk(ignored)
    run = kind(disk)
    for _ in range(saves):
        run.save()
    run.lease.release()
    return disk


def find_violations(
    disk: SimulatedDisk, most_at_a_cut: int, enough: int | None = None, seed: int = 0
) -> tuple[int, list[str]]:
    states = 0
    found = []
    for cut, left in after_power_cuts(disk.calls, most_at_a_cut=most_at_a_cut, seed=seed):
        states += 1
        message = find_violation(left, list_acknowledged(disk.calls[:cut]))
        if message:
            found.append(f"after {cut} calls: {message}")
            if enough is not None and len(found) >= enough:
                break
    return states, found


def test_no_power_cut_loses_an_acknowledged_checkpoint() -> None:
    """The nightly run checks more states."""
    states, found = find_violations(run_saves(saves=20), most_at_a_cut=64)
    assert not found, found[:3]
    assert states > 2_000, states


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_no_power_cut_of_a_long_run_loses_an_acknowledged_checkpoint(seed: int) -> None:
    """Every call of `create` and `delete` syncs, so few states are possible at each cut."""
    states, found = find_violations(run_saves(saves=150), most_at_a_cut=450, seed=seed)
    assert not found, found[:3]
    assert states >= 10_000, states


def save_after_crash(left: SimulatedDisk, seed: int) -> tuple[SimulatedDisk, SimulatedDisk]:
    """Save twice with a new writer to a crashed disk. Return the disk before and after."""
    before = SimulatedDisk()
    before.directories = set(left.directories)
    before.files = dict(left.files)
    run = Run(left, seed=seed)
    run.save()
    run.save()
    run.lease.release()
    return before, left


@pytest.mark.parametrize("every", [pytest.param(197, id="some"), pytest.param(7, id="many", marks=pytest.mark.nightly)])
def test_a_second_crash_loses_no_acknowledged_checkpoint_either(every: int) -> None:
    """Blobs of the first writer never become part of a checkpoint of the second one."""
    disk = run_saves(saves=3)
    looked_at = 0
    for number, (cut, left) in enumerate(after_power_cuts(disk.calls, most_at_a_cut=64)):
        if number % every or not left.directories >= {RUN / "segments", RUN / "manifests"}:
            continue
        promised = list_acknowledged(disk.calls[:cut])
        before, after = save_after_crash(left, seed=number)
        for second, twice in after_power_cuts(after.calls, before, most_at_a_cut=8, seed=number):
            again = promised + list_acknowledged(after.calls[:second])
            kept = again if len(again) == len(promised) else again[len(promised) - KEEP :]
            assert not find_violation(twice, kept[-1:]), (cut, second)
            looked_at += 1
    assert looked_at > 100


class CollectsFirst(Run):
    """Removes old checkpoints before it writes the new one."""

    def commit(self, manifest: Manifest) -> None:
        collect(self.reader, self.lease, KEEP - 1, manifest.files)
        super().commit(manifest)


class CollectsFilesFirst(Run):
    """Removes files before the manifests that name them."""

    def commit(self, manifest: Manifest) -> None:
        super().commit(manifest)
        for name in self.reader.file_sizes():
            if name not in manifest.files:
                self.blobs.delete(SEGMENTS + name)


class Replaces(Run):
    """Deletes the old manifest before it writes the new one."""

    def commit(self, manifest: Manifest) -> None:
        for number in self.reader.numbers():
            self.blobs.delete(MANIFESTS + manifest_name(number))
        super().commit(manifest)


class WritesInPlace(Run):
    """Writes the manifest under its final name, and never syncs its bytes."""

    def commit(self, manifest: Manifest) -> None:
        folder = RUN / "manifests"
        self.disk.make_directory(folder)
        file = self.disk.create(folder / manifest_name(manifest.number))
        self.disk.write(file, encode(manifest))
        self.disk.close(file)
        self.disk.sync_directory(folder)


MUTANTS: dict[str, tuple[tuple[tuple[str, str], ...], type[Run]]] = {
    "data files are not synced": ((("sync", "/segments/"),), Run),
    "the directory of data files is not synced": ((("sync_directory", "/segments"),), Run),
    "manifests are not synced": ((("sync", "/manifests/"),), Run),
    "the directory of manifests is not synced": ((("sync_directory", "/manifests"),), Run),
    "new directories are not synced": ((("sync_directory", "/one"), ("sync_directory", "/runs")), Run),
    "collected before the commit": ((), CollectsFirst),
    "files are collected before manifests": ((), CollectsFilesFirst),
    "the last manifest is deleted first": ((), Replaces),
    "manifests are written in place, unsynced": ((), WritesInPlace),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_without_a_step_is_noticed(mutant: str) -> None:
    """The simulation would notice the same mistake in the real protocol."""
    ignored, kind = MUTANTS[mutant]
    _, found = find_violations(run_saves(4, ignored, kind), most_at_a_cut=64, enough=1)
    assert found


class CollectsWithoutSync(SimulatedDisk):
    """A disk without the sync between removing manifests and removing files."""

    _is_collecting = False

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._is_collecting = path.parent.name == "manifests" and path.suffix == ".json"

    def sync_directory(self, path: Path) -> None:
        if not (self._is_collecting and path.name == "manifests"):
            super().sync_directory(path)
        self._is_collecting = False


def test_a_collection_without_a_sync_between_manifests_and_files_is_noticed() -> None:
    """A manifest that exists again after a power cut must not name files that were removed."""
    disk = CollectsWithoutSync()
    run = Run(disk)
    for _ in range(5):
        run.save()
    _, found = find_violations(disk, most_at_a_cut=64, enough=1)
    assert found


def test_two_writers_with_one_id_are_refused() -> None:
    """Otherwise, a writer after a crash would replace blobs of an earlier checkpoint."""
    disk = run_saves(saves=2)
    promised = list_acknowledged(disk.calls)
    with pytest.raises(AssertionError):
        Run(disk, seed=1, writer_id=f"{0:016x}").save()
    assert not find_violation(disk, promised)
