"""Merging: many small files of records become one, so that a reader can keep all of them open.

In:  a ledger whose records lie in many files, as frequent saves leave them.  Out: the same records, in fewer.
Invariant: a record is copied as it is, if it is still the very one that the ledger names; the files that it leaves are
removed only when no checkpoint names them any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from holdall.checkpoint.ledger import Filling, Ledger
from holdall.checkpoint.manifest import Ref
from holdall.checkpoint.place import Library
from holdall.checkpoint.restore import Shelf
from holdall.checkpoint.writing import RecordWriter

MOST_FILES = 192
_FILES_LEFT = 96


def merge(ledger: Ledger, library: Library, writer: RecordWriter) -> Ledger:
    """Copy the records of the smallest files to `writer` if there are too many; return where all of them lie then."""
    used: Counter[str] = Counter()
    for ref in set(_refs(ledger)):
        used[ref.file] += ref.nbytes
    if len(used) <= MOST_FILES:
        return ledger
    smallest = {name for name, _ in used.most_common()[_FILES_LEFT:]}
    shelf = Shelf(library)
    moved = {ref: _copied(shelf, ref, writer) for ref in dict.fromkeys(_refs(ledger)) if ref.file in smallest}

    def now(ref: Ref) -> Ref:
        return moved.get(ref, ref)

    merged = replace(
        ledger,
        rows={n: (key, replace(chunk, ref=now(chunk.ref))) for n, (key, chunk) in ledger.rows.items()},
        logs={first: now(ref) for first, ref in ledger.logs.items()},
        dictionaries={name: now(ref) for name, ref in ledger.dictionaries.items()},
        blocks=type(ledger.blocks)(),
        filling=type(ledger.filling)(),
    )
    for block, refs in list(ledger.blocks.items()):
        merged.blocks[block] = tuple(now(ref) for ref in refs)
    for key, filled in list(ledger.filling.items()):
        merged.filling[key] = Filling(tuple(now(ref) for ref in filled.refs), filled.slices)
    return merged


def _refs(ledger: Ledger) -> Iterable[Ref]:
    yield from (chunk.ref for _, chunk in ledger.rows.values())
    yield from ledger.logs.values()
    yield from ledger.dictionaries.values()
    for refs in list(ledger.blocks.values()):
        yield from refs
    for filled in list(ledger.filling.values()):
        yield from filled.refs


def _copied(shelf: Shelf, ref: Ref, writer: RecordWriter) -> Ref:
    record, file = shelf.record(ref)
    head_bytes = record.nbytes - sum(part.nbytes for part in record.parts.values())
    raw = memoryview(file.read(ref.start, ref.nbytes))
    return writer.append([raw[:32], raw[32:head_bytes], raw[head_bytes:]])
