"""Damaged blocks: an error, or some bytes of the right size; never a crash, and nothing outside is touched.

Neither LZ4 nor Zstandard notices every flipped bit, so wrong bytes may come back of a block in memory; units in files
have checksums for that. What must hold is that no length, offset, count or number that was read is trusted.

The blocks and their damages are in damaged_blocks.py, which also runs as a script: in a process of its own, memory that
ends at a guarded page, or a sanitizer, makes a read outside a block a crash that is seen. Nightly, 200,000 blocks are
read under a sanitizer, from a seed that is another one every day; `HOLDALL_FUZZ_SEED` sets it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import holdall
from holdall import _native
from holdall.errors import DamageError
from holdall.native import NativeCoder
from holdall.storage.blocks import Codec, Coded, Method, Predictor, Transform
from holdall.storage.ticks import Coder

from . import damaged_blocks
from .damaged_blocks import (
    BLOCKS,
    CLAIMS,
    COUNT,
    DAMAGES,
    SINGLES,
    WHOLE,
    Block,
    checks_of,
    damaged,
    guarded,
    laid,
    read_damaged,
)
from .seeds import rotating_seed

ROOT = Path(__file__).parents[2]
SCRIPT = Path(damaged_blocks.__file__)
LINKED = ("zstandard", "lz4")
CASES_IN_A_CHILD = 3_000
CASES_A_NIGHT = 200_000
CHILDREN_A_NIGHT = 8


@pytest.fixture(scope="module")
def coder() -> Coder:
    return NativeCoder()


# ---------------------------------------------------------------- the rules


def test_whole_blocks_are_read(coder: Coder) -> None:
    """Without damage nothing is refused, so that what follows is about damage."""
    for block in BLOCKS:
        assert read_damaged(coder, block, guarded) is not None


@pytest.mark.parametrize("kind", DAMAGES)
@given(number=st.integers(0, len(BLOCKS) - 1), seed=st.integers(0, 2**32 - 1))
def test_any_damage_is_an_error_or_some_bytes(coder: Coder, kind: str, number: int, seed: int) -> None:
    """Whatever was flipped, cut, zeroed or made up."""
    read_damaged(coder, damaged(number, [kind], seed), np.copy)


@pytest.mark.parametrize("kind", ["data", "checks", "file"])
@given(number=st.integers(0, len(BLOCKS) - 1), seed=st.integers(0, 2**32 - 1))
def test_damage_to_a_file_is_an_error_or_the_same_bytes(coder: Coder, kind: str, number: int, seed: int) -> None:
    """Never others: what was read has the sum that it had when it was written, or it is not returned."""
    whole = replace(BLOCKS[number % len(BLOCKS)], in_file=True)
    whole.checks = checks_of(whole)
    block = replace(whole)
    DAMAGES[kind](block, np.random.default_rng(seed))
    if block.data.size < whole.data.size:
        block.cut, block.data = whole.data.size - block.data.size, whole.data
    rows = read_damaged(coder, block, np.copy)
    assert rows is None or rows == read_damaged(coder, whole, np.copy)


@pytest.mark.parametrize("start", [1, COUNT - 1])
def test_offsets_that_go_back_or_beyond_the_data_are_refused(start: int, coder: Coder) -> None:
    """Even where the bytes between them would make a slice."""
    for block in SINGLES:
        for wrong in (int(block.offsets[start + 1]) + 1, block.data.size + 1, 2**32 - 1):
            offsets = block.offsets.copy()
            offsets[start] = wrong
            assert read_damaged(coder, replace(block, offsets=offsets, numbers=np.array([start])), guarded) is None


@pytest.mark.parametrize("number", [-1, COUNT, COUNT + 1, 2**32, -(2**63)])
def test_a_slice_that_is_not_in_the_block_is_refused(number: int, coder: Coder) -> None:
    """The error names the slice."""
    for block in BLOCKS:
        sealed = coder.adopt(Coded(block.codec, COUNT, block.offsets, block.palette, laid(block, np.copy)))
        out = np.empty((2, block.codec.transform.slice_bytes), np.uint8)
        with pytest.raises(DamageError, match=rf"slice {number}\b"):
            coder.decode(sealed, np.array([0, number]), out)


@pytest.mark.parametrize("offsets", [0, 1, 2])
@pytest.mark.parametrize("group", [0, -1, 65, 1 << 20, 1 << 31, 1 << 40])
def test_a_unit_that_claims_to_be_large_is_refused_before_room_is_made_for_it(group: int, offsets: int) -> None:
    """Even where offsets and sums go with it, or where there are none."""
    for block in SINGLES:
        codec, nothing = replace(block.codec, group=group), np.zeros(offsets, np.uint32)
        with pytest.raises(DamageError, match=f"groups of {group} "):
            Coded(codec, COUNT, nothing, block.palette, block.data)


def test_a_slice_that_claims_to_be_large_takes_no_memory(coder: Coder) -> None:
    """A few bytes can stand for gigabytes; what is allocated is what a slice takes, whatever its header says."""
    codec = Codec(Method.ZSTD, 3, Transform(900))
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    claim = b"\x28\xb5\x2f\xfd\xe0" + (1 << 45).to_bytes(8, "little") + bytes(23)
    for piece in (bomb, claim):
        data = np.frombuffer(piece, np.uint8)
        block = Block(codec, data, np.array([0, data.size], np.uint32), np.zeros(0, np.uint8), np.array([0]))
        tracemalloc.start()
        try:
            assert read_damaged(coder, block, np.copy) is None
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000


# ---------------------------------------------------------------- in a process of its own


def run_child(
    kinds: list[str], cases: int, *options: str, seed: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(kinds), str(cases), str(seed), *options],
        capture_output=True, text=True, check=False, timeout=3000, env=os.environ | environment,
    )  # fmt: skip


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit {done.returncode}: " + "\n".join(done.stderr.splitlines()[-30:])


def test_damaged_blocks_do_not_crash_a_process() -> None:
    """Thousands of them, in memory that ends where none may be read any more."""
    done = run_child([WHOLE, *DAMAGES], CASES_IN_A_CHILD)
    assert done.returncode == 0, last_lines(done)


@pytest.fixture(scope="module")
def claimed() -> subprocess.CompletedProcess[str]:
    """One process for all of them, which lets each kind befall 500 blocks, alone."""
    return run_child(["/".join(CLAIMS)], 500)


@pytest.mark.parametrize("kind", CLAIMS)
def test_false_claims_do_not_crash_a_process(kind: str, claimed: subprocess.CompletedProcess[str]) -> None:
    """C goes by the transform and the palette's size, so both are checked before it does."""
    assert claimed.returncode == 0, last_lines(claimed)
    told = re.findall(rf"^damaged\(\d+, \['{kind}'(?:, '{kind}')*\], \d+\)$", claimed.stderr, re.MULTILINE)
    assert len(told) == 500


@pytest.mark.skipif(sys.platform != "linux", reason="guarded pages are made with Linux's calls")
def test_a_read_outside_a_block_would_be_noticed() -> None:
    """The guard works: reading one byte further ends the process."""
    script = f"import runpy; runpy.run_path({str(SCRIPT)!r})['peek']()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode < 0, last_lines(done)


CHANGES = {
    "none": b"",
    "a count that does not end": b"\x81\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    "more than there are": b"\x02\x00\x01\x07",
    "no length": b"\x01\x05",
    "behind the slice": b"\x01\x65\x01\x07",
    "beyond its end": b"\x01\x5a\x0b" + 11 * b"\x07",
    "far behind it": b"\x01\xff\xff\xff\xff\x7f\x01\x07",
    "far beyond it": b"\x01\x00\xff\xff\xff\xff\x7f\x07",
    "two that leave it together": b"\x02\x32\x01\x07\x32\x01\x07",
    "longer than the unit": b"\x01\x00\x09\x07",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_that_leave_their_slice_or_unit_are_refused(kind: str, coder: Coder) -> None:
    """The first slice of a unit of three is whole; the second is what its changes say, or damaged."""
    first = np.arange(100, dtype=np.uint8)
    codec = Codec(Method.STORED, 0, Transform(100, predictor=Predictor.CHANGES), group=3)

    def read(noted: bytes, number: int) -> bytes | None:
        data = np.frombuffer(first.tobytes() + noted, np.uint8)
        offsets = np.array([0, len(data)], np.uint32)
        block = Block(codec, data, offsets, np.zeros(0, np.uint8), np.array([number]), count=3)
        return read_damaged(coder, block, guarded)

    changed = first.copy()
    changed[[0, 99]] = 7
    assert read(b"\x02\x00\x01\x07\x62\x01\x07\x00", 1) == changed.tobytes()
    assert read(CHANGES[kind], 1) is None
    assert read(b"\x00" + CHANGES[kind], 2) is None


# ---------------------------------------------------------------- under a sanitizer


def sanitize(package: Path) -> dict[str, str]:
    """Build the native module of a copy of holdall with every access and every sum checked.

    Return the environment in which it is imported.
    """
    compiler, third_party = shutil.which("gcc"), ROOT / "third_party"
    if compiler is None or not third_party.exists():
        pytest.skip("needs gcc and third_party/, which `make setup` fetches")
    includes = [sysconfig.get_paths()["include"], np.get_include(), *(str(third_party / name) for name in LINKED)]
    command = [
        compiler,
        "-fsanitize=address",
        "-O1",
        "-g",
        "-std=c11",
        "-fPIC",
        *(f"-I{folder}" for folder in includes),
    ]
    for source in third_party.glob("*/*.c"):
        made = subprocess.run([*command, "-c", str(source), "-o", str(package / f"{source.stem}.o")], check=False)
        if made.returncode != 0:
            pytest.skip("this compiler has no sanitizers")
    files = [str(path) for path in sorted([*(package / "_native").glob("*.c"), *package.glob("*.o")])]
    command += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-shared", *files]
    subprocess.run([*command, "-o", str(package / Path(_native.__file__).name)], check=True)
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    options = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096"  # as on a small machine
    return {
        "LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(package.parent),
    }  # fmt: skip


def copy_package(to: Path) -> Path:
    """Copy holdall, to be built in another way."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    return shutil.copytree(Path(holdall.__file__).parent, to / "src" / "holdall", ignore=unwanted)


def first_seed() -> int:
    return rotating_seed() * CHILDREN_A_NIGHT


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_sanitizer_finds_nothing(tmp_path: Path) -> None:
    """The same with every access checked by the compiler, where it can do that, from another seed every day."""
    first, environment = first_seed(), sanitize(copy_package(tmp_path))
    for seed in range(first, first + CHILDREN_A_NIGHT):
        kinds = [*([WHOLE] if seed == first else []), *DAMAGES, *CLAIMS]
        done = run_child(kinds, CASES_A_NIGHT // CHILDREN_A_NIGHT, "sanitized", seed=seed, **environment)
        assert done.returncode == 0, f"seed {seed}: {last_lines(done)}"


OLD_MISTAKES = {
    "a sum of two positions in a file overflows": (
        "_native/decode.c",
        " || b->file_start > INT64_MAX - b->data_bytes",
        "",
        "signed integer overflow",
    ),
    "an unsound group passes where there are no offsets": (
        "storage/blocks.py",
        "if not (self.codec.is_sound and self.count >= 0 and self._fits(-(-self.count // group))):",
        "if not (self.count >= 0 and self._fits(-(-self.count // group) if self.codec.is_sound else -1)):",
        "MemoryError|AddressSanitizer",
    ),
}
"""What was wrong once: a file of holdall's, what stands there now, what stood there, and what the fuzz says of it."""


@pytest.mark.parametrize("mistake", OLD_MISTAKES)
def test_what_was_wrong_once_is_told_as_the_code_is_now(mistake: str) -> None:
    """Else a night finds out, or nobody."""
    file, now, _, _ = OLD_MISTAKES[mistake]
    text = (Path(holdall.__file__).parent / file).read_text(encoding="utf-8")
    assert text.count(now) == 1, f"{file} has changed; say what the mistake looks like now"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", OLD_MISTAKES)
def test_a_night_would_find_what_was_wrong_once(tmp_path: Path, mistake: str) -> None:
    """Put back into a copy, each of them ends the run."""
    file, now, then, message = OLD_MISTAKES[mistake]
    package = copy_package(tmp_path)
    text = (package / file).read_text(encoding="utf-8")
    (package / file).write_text(text.replace(now, then), encoding="utf-8")
    environment = sanitize(package)
    first, kinds = first_seed(), [*DAMAGES, *CLAIMS]
    for seed in range(first, first + CHILDREN_A_NIGHT):
        done = run_child(kinds, CASES_A_NIGHT // CHILDREN_A_NIGHT, "sanitized", seed=seed, **environment)
        if done.returncode != 0:
            break
    assert re.search(message, done.stderr), last_lines(done)
