"""After a power cut at any call the last acknowledged checkpoint is there. Every broken protocol is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdall.checkpoint.manifest import Manifest, encode, manifest_name
from holdall.checkpoint.reader import MANIFESTS, SEGMENTS
from holdall.checkpoint.retention import collect

from .protocol import KEEP, RUN, Run, acknowledged, violation
from .simulated import SimulatedDisk, after_power_cuts


def history(saves: int, ignored: tuple[tuple[str, str], ...] = (), kind: type[Run] = Run) -> SimulatedDisk:
    disk = SimulatedDisk(ignored)
    run = kind(disk)
    for _ in range(saves):
        run.save()
    run.lease.release()
    return disk


def violations(
    disk: SimulatedDisk, most_at_a_cut: int, enough: int | None = None, seed: int = 0
) -> tuple[int, list[str]]:
    states = 0
    found = []
    for cut, left in after_power_cuts(disk.calls, most_at_a_cut=most_at_a_cut, seed=seed):
        states += 1
        if told := violation(left, acknowledged(disk.calls[:cut])):
            found.append(f"after {cut} calls: {told}")
            if enough is not None and len(found) >= enough:
                break
    return states, found


def test_no_power_cut_loses_an_acknowledged_checkpoint() -> None:
    """A slice of the states that the nightly run looks at."""
    states, found = violations(history(saves=20), most_at_a_cut=64)
    assert not found, found[:3]
    assert states > 2_000, states


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_no_power_cut_of_a_long_run_loses_an_acknowledged_checkpoint(seed: int) -> None:
    """More saves. Every call of `create` and `delete` syncs, so few states are possible at each cut."""
    states, found = violations(history(saves=150), most_at_a_cut=450, seed=seed)
    assert not found, found[:3]
    assert states >= 10_000, states


def recovered(left: SimulatedDisk, seed: int) -> tuple[SimulatedDisk, SimulatedDisk]:
    """Open a crashed disk with a new writer, and save twice. Return the disk before and after."""
    before = SimulatedDisk()
    before.directories = set(left.directories)
    before.files = dict(left.files)
    run = Run(left, seed=seed)
    run.save()
    run.save()
    run.lease.release()
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


class CollectsFirst(Run):
    """Removes what it believes stale before the new checkpoint is there."""

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
    """Keeps one manifest, deletes it, and puts the next one in its place."""

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
def test_a_protocol_that_leaves_a_step_out_is_caught(mutant: str) -> None:
    """The simulation finds each of these: it would find the same in the real one."""
    ignored, kind = MUTANTS[mutant]
    _, found = violations(history(4, ignored, kind), most_at_a_cut=64, enough=1)
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


def test_a_name_used_twice_is_refused() -> None:
    """Without an id of its own, a writer that comes after a crash would replace blobs of the checkpoint before."""
    disk = history(saves=2)
    promised = acknowledged(disk.calls)
    with pytest.raises(AssertionError):
        Run(disk, seed=1, writer_id=f"{0:016x}").save()
    assert not violation(disk, promised)
