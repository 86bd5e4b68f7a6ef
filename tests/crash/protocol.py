"""A run of small checkpoints on a simulated disk, and the rule that must be true after a power cut."""

from __future__ import annotations

import hashlib

from holdall.checkpoint.blobs import Lease
from holdall.checkpoint.directory_blobs import DirectoryBlobs
from holdall.checkpoint.load import load_newest
from holdall.checkpoint.manifest import (
    BlockEntry,
    Manifest,
    Ref,
    encode,
    generate_file_names,
    manifest_name,
    require_files,
)
from holdall.checkpoint.reader import MANIFESTS, SEGMENTS, CheckpointReader
from holdall.checkpoint.retention import collect
from holdall.errors import CheckpointError, DamageError

from .simulated import ROOT, Call, SimulatedDisk

RUN = ROOT / "runs" / "one"
KEEP = 2


class Run:
    """A trainer that saves. Every checkpoint creates four blobs, and names some of the earlier ones."""

    def __init__(self, disk: SimulatedDisk, seed: int = 0, writer_id: str | None = None) -> None:
        self.disk = disk
        self.blobs = DirectoryBlobs(RUN, disk)
        self.reader = CheckpointReader(self.blobs)
        self.lease: Lease = self.blobs.lock("a run")
        self.writer_id = writer_id or f"{seed:016x}"
        self._names = generate_file_names(self.writer_id)
        self._seed = seed
        self._files: dict[str, int] = {}
        self._refs: list[Ref] = []
        numbers = self.reader.numbers()
        self._number = numbers[0] if numbers else 0
        if numbers:
            last = load_newest(self.reader, lambda manifest: manifest)
            self._files = dict(last.files)
            self._refs = [block.ref for block in last.blocks]

    def save(self) -> None:
        """Write one checkpoint, acknowledge it, and collect."""
        self._number += 1
        for part in range(4):
            content = f"checkpoint {self._number}, part {part}, of run {self._seed}; ".encode() * 3
            self._write(content)
        self._refs = self._refs[-6:]
        self._files = {ref.file: self._files[ref.file] for ref in self._refs}
        self.commit(
            Manifest(
                number=self._number,
                commit=hashlib.sha256(f"{self._seed} {self._number}".encode()).hexdigest()[:32],
                writer_id=self.writer_id,
                time=0.0,
                first_tick=0,
                next_tick=len(self._refs),
                capacity_ticks=1,
                transitions=0,
                schema={},
                files=self._files,
                state=self._refs[-1],
                blocks=tuple(BlockEntry(ref, 0) for ref in self._refs),
            )
        )
        self.disk.mark(f"{self._number}")
        collect(self.reader, self.lease, KEEP, self._files)

    def commit(self, manifest: Manifest) -> None:
        """Create the manifest."""
        assert self.blobs.create(MANIFESTS + manifest_name(manifest.number), encode(manifest))

    def _write(self, content: bytes) -> None:
        name = next(self._names)
        assert self.blobs.create(SEGMENTS + name, content)
        self._files[name] = len(content)
        self._refs.append(Ref(name, 0, len(content), hashlib.sha256(content).hexdigest()[:32]))


def list_acknowledged(calls: list[Call]) -> list[int]:
    """Return the numbers of the acknowledged checkpoints, oldest first."""
    return [int(call.data) for call in calls if call.what == "mark"]


def find_violation(disk: SimulatedDisk, promised: list[int]) -> str:
    """Return a message about the rule that a crash broke, or an empty text.

    The rule: the newest whole checkpoint is the last acknowledged one or a newer one. The last `KEEP` acknowledged
    checkpoints are whole. Every manifest that can be read has all its bytes.
    """
    reader = CheckpointReader(DirectoryBlobs(RUN, disk))
    if promised:
        try:
            found = load_newest(reader, lambda manifest: manifest)
        except (CheckpointError, DamageError) as error:
            return f"checkpoint {promised[-1]} was acknowledged, and nothing is left: {error}"
        if found.number < promised[-1]:
            return f"checkpoint {promised[-1]} was acknowledged, and {found.number} is the newest"
    sizes = reader.file_sizes()
    whole = set()
    for number in reader.numbers():
        try:
            manifest = reader.manifest(number)
        except DamageError as error:
            if number in promised[-KEEP:]:
                return str(error)
            continue
        try:
            require_files(manifest, sizes)
        except CheckpointError as error:
            return str(error)
        for ref in manifest.refs:
            if hashlib.sha256(disk.files[RUN / "segments" / ref.file].content).hexdigest()[:32] != ref.digest:
                return f"checkpoint {number} has other bytes in {ref.file} than were written"
        whole.add(number)
    if missing := [number for number in promised[-KEEP:] if number not in whole]:
        return f"checkpoints {missing} were acknowledged and not yet collected, but are missing"
    return ""
