"""Decoding a damaged block raises an error or returns bytes of the right size, and touches no other memory.

Neither LZ4 nor Zstandard notices every flipped bit, so a damaged block in memory may give wrong bytes. Units in files
have checksums. The tests check that the decoder verifies every length, offset, count and number that it reads.

The blocks and their damages are in damaged_blocks.py, which is also a script. Every night, 200,000 blocks are read
under a sanitizer, which turns a read outside of a block into a crash. Every day has another seed, and
`HOLDALL_FUZZ_SEED` sets it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdall._native import Coded, decode
from holdall.codec.codec import Codec, Method, Transform

from . import damaged_blocks
from .damaged_blocks import (
    BLOCKS,
    CLAIMS,
    COUNT,
    DAMAGES,
    SINGLES,
    WHOLE,
    Block,
    compute_checks,
    make_coded,
    make_damaged,
    read_damaged,
)
from .old_mistakes import OldMistake
from .sanitizer import build_sanitized, copy_package
from .seeds import choose_seed

SCRIPT = Path(damaged_blocks.__file__)
CASES_IN_A_CHILD = 3_000
CASES_A_NIGHT = 200_000
CHILDREN_A_NIGHT = 8


# ---------------------------------------------------------------- the rules


def test_whole_blocks_are_read() -> None:
    """No block is refused before it is damaged."""
    for block in BLOCKS:
        assert read_damaged(block) is not None


@pytest.mark.parametrize("kind", DAMAGES)
@given(number=st.integers(0, len(BLOCKS) - 1), seed=st.integers(0, 2**32 - 1))
def test_any_damage_is_an_error_or_some_bytes(kind: str, number: int, seed: int) -> None:
    """Bytes are flipped, cut, zeroed or replaced."""
    read_damaged(make_damaged(number, [kind], seed))


@pytest.mark.parametrize("kind", ["data", "checks", "file"])
@given(number=st.integers(0, len(BLOCKS) - 1), seed=st.integers(0, 2**32 - 1))
def test_damage_to_a_file_is_an_error_or_the_same_bytes(kind: str, number: int, seed: int) -> None:
    """Units in a file have checksums, so wrong bytes are never returned."""
    whole = replace(BLOCKS[number % len(BLOCKS)], in_file=True)
    whole.checks = compute_checks(whole)
    block = replace(whole)
    DAMAGES[kind](block, np.random.default_rng(seed))
    if block.data.size < whole.data.size:
        block.cut = whole.data.size - block.data.size
        block.data = whole.data
    rows = read_damaged(block)
    assert rows is None or rows == read_damaged(whole)


@pytest.mark.parametrize("start", [1, COUNT - 1])
def test_offsets_that_go_back_or_beyond_the_data_are_refused(start: int) -> None:
    """They are refused even if the bytes between them are a valid slice."""
    for block in SINGLES:
        for wrong in (int(block.offsets[start + 1]) + 1, block.data.size + 1, 2**32 - 1):
            offsets = block.offsets.copy()
            offsets[start] = wrong
            assert read_damaged(replace(block, offsets=offsets, numbers=np.array([start]))) is None


@pytest.mark.parametrize("number", [-1, COUNT, COUNT + 1, 2**32, -(2**63)])
def test_a_slice_that_is_not_in_the_block_is_refused(number: int) -> None:
    for block in BLOCKS:
        with pytest.raises(IndexError, match=r"but the block has 12 slices"):
            decode(make_coded(block), number, 1)


@pytest.mark.parametrize("offsets", [0, 1, 2])
@pytest.mark.parametrize("group", [0, -1, 65, 1 << 20, 1 << 31, 1 << 40])
def test_a_unit_that_claims_to_be_large_is_refused_before_it_is_allocated(group: int, offsets: int) -> None:
    """The rule also holds if the offsets agree with the claim or are missing."""
    for block in SINGLES:
        codec = replace(block.codec, group=group)
        nothing = np.zeros(offsets, np.uint32)
        with pytest.raises(ValueError, match=f"group={group}"):
            Coded(codec, COUNT, nothing, block.palette, block.data)


def test_a_slice_that_claims_to_be_large_takes_no_memory() -> None:
    """A few bytes can claim gigabytes. Only the bytes of a slice are allocated, whatever its header says."""
    codec = Codec(900, Method.ZSTANDARD, 3)
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    claim = b"\x28\xb5\x2f\xfd\xe0" + (1 << 45).to_bytes(8, "little") + bytes(23)
    for piece in (bomb, claim):
        data = np.frombuffer(piece, np.uint8)
        offsets = np.array([0, data.size], np.uint32)
        block = Block(codec, data, offsets, np.zeros(0, np.uint8), np.array([0]), count=1)
        tracemalloc.start()
        try:
            assert read_damaged(block) is None
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000


# ---------------------------------------------------------------- the script


def run_child(kinds: list[str], cases: int, seed: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(kinds), str(cases), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
        env=os.environ | environment,
    )


def format_end(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit {done.returncode}: " + "\n".join(done.stderr.splitlines()[-30:])


def test_damaged_blocks_do_not_crash_a_process() -> None:
    """The process reads thousands of blocks."""
    done = run_child([WHOLE, *DAMAGES], CASES_IN_A_CHILD)
    assert done.returncode == 0, format_end(done)


@pytest.fixture(scope="module")
def claimed() -> subprocess.CompletedProcess[str]:
    """Return the ended process of the script, which applied each claim by itself to 500 blocks."""
    return run_child(["/".join(CLAIMS)], 500)


@pytest.mark.parametrize("kind", CLAIMS)
def test_false_claims_do_not_crash_a_process(kind: str, claimed: subprocess.CompletedProcess[str]) -> None:
    """The C code relies on the transform and the palette's size, so both are checked first."""
    assert claimed.returncode == 0, format_end(claimed)
    calls = re.findall(rf"^make_damaged\(\d+, \['{kind}'(?:, '{kind}')*\], \d+\)$", claimed.stderr, re.MULTILINE)
    assert len(calls) == 500


CHANGES = {
    "none": b"",
    "a count that does not end": b"\x81\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    "more changes than follow": b"\x02\x00\x01\x07",
    "no length": b"\x01\x05",
    "after the slice": b"\x01\x65\x01\x07",
    "beyond its end": b"\x01\x5a\x0b" + 11 * b"\x07",
    "far after it": b"\x01\xff\xff\xff\xff\x7f\x01\x07",
    "far beyond it": b"\x01\x00\xff\xff\xff\xff\x7f\x07",
    "two whose sum is beyond its end": b"\x02\x32\x01\x07\x32\x01\x07",
    "longer than the unit": b"\x01\x00\x09\x07",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_outside_of_their_slice_or_unit_are_refused(kind: str) -> None:
    """The unit has three slices. The first one is whole, and the others are stored as changes."""
    first = np.arange(100, dtype=np.uint8)
    codec = Codec(100, group=3, transform=Transform.CHANGES)

    def read(noted: bytes, number: int) -> bytes | None:
        data = np.frombuffer(first.tobytes() + noted, np.uint8)
        offsets = np.array([0, len(data)], np.uint32)
        block = Block(codec, data, offsets, np.zeros(0, np.uint8), np.array([number]), count=3)
        return read_damaged(block)

    changed = first.copy()
    changed[[0, 99]] = 7
    assert read(b"\x02\x00\x01\x07\x62\x01\x07\x00", 1) == changed.tobytes()
    assert read(CHANGES[kind], 1) is None
    assert read(b"\x00" + CHANGES[kind], 2) is None


# ---------------------------------------------------------------- under a sanitizer


def choose_first_seed() -> int:
    return choose_seed() * CHILDREN_A_NIGHT


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes that use a build with sanitizers."""
    return build_sanitized(copy_package(tmp_path_factory.mktemp("sanitized")))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("child", range(CHILDREN_A_NIGHT))
def test_a_sanitizer_finds_nothing(sanitized: dict[str, str], child: int) -> None:
    """Every day has another seed."""
    seed = choose_first_seed() + child
    kinds = [*([WHOLE] if child == 0 else []), *DAMAGES, *CLAIMS]
    done = run_child(kinds, CASES_A_NIGHT // CHILDREN_A_NIGHT, seed=seed, **sanitized)
    assert done.returncode == 0, f"seed {seed}: {format_end(done)}"


OLD_MISTAKES = {
    "a sum of two positions in a file overflows": OldMistake(
        "_native/decode.c",
        " || b->file_start > INT64_MAX - b->data_bytes",
        "",
        r"signed integer overflow|OSError: \[Errno 22\]",  # Some positions only reach the system, which refuses them.
    ),
    "a unit has fewer bytes than its colours take": OldMistake(
        "_native/colours.c",
        "if (length < 1 || 1 + 4 * (int64_t)from[0] > length) return -1;",
        "if (length < 1) return -1;",
        "AddressSanitizer|runtime error",
    ),
}


@pytest.mark.parametrize("mistake", OLD_MISTAKES.values(), ids=OLD_MISTAKES)
def test_every_old_mistake_can_be_put_back_into_the_present_code(mistake: OldMistake) -> None:
    mistake.require_present_code()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", OLD_MISTAKES.values(), ids=OLD_MISTAKES)
def test_the_sanitizer_notices_every_old_mistake(tmp_path: Path, mistake: OldMistake) -> None:
    package = copy_package(tmp_path)
    mistake.put_back(package)
    environment = build_sanitized(package)
    first = choose_first_seed()
    kinds = [*DAMAGES, *CLAIMS]
    for seed in range(first, first + CHILDREN_A_NIGHT):
        done = run_child(kinds, CASES_A_NIGHT // CHILDREN_A_NIGHT, seed=seed, **environment)
        if done.returncode != 0:
            break
    assert re.search(mistake.message, done.stderr), format_end(done)
