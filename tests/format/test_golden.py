"""Golden checkpoints of every format version are read bit for bit."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall import ReplayMemory
from holdall.checkpoint import open_reader
from holdall.checkpoint.load import RecordFiles
from holdall.codec.codec import Transform
from holdall.store.records import Record
from holdall.testing import OracleMemory, assert_same_bits

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if path.is_dir() and path.name.startswith("v"))


def load_writer() -> Any:
    spec = importlib.util.spec_from_file_location("write_golden", HERE / "write_golden.py")
    if spec is None or spec.loader is None:
        raise ImportError("write_golden.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["write_golden"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_is_read_bit_for_bit(version: str, tmp_path: Path) -> None:
    """The loaded memory has every transition, the attached file, and the generator's state."""
    golden = load_writer()
    shutil.copytree(HERE / version, tmp_path / "run")
    oracle = OracleMemory(golden.CAPACITY_TICKS * golden.LANES, golden.LANES)
    for tick in range(golden.TICKS):
        oracle.add(**golden.make_tick(tick, version))
    oracle.update(golden.REWRITTEN, log_prob=np.ones((len(golden.REWRITTEN), 1), np.float16))
    with ReplayMemory.load(tmp_path / "run") as memory:
        assert (len(memory), memory.next_id) == (len(oracle), oracle.next_id)
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
        assert memory.attached["agents/agent_0.pth"] == golden.ATTACHED
        expected = np.random.default_rng(7).integers(oracle.first_id, oracle.next_id, size=5)
        drawn = memory.sample(5).ids
        valid = np.isin(expected, oracle.ids)
        assert drawn[valid].tolist() == expected[valid].tolist()
        tick = golden.make_tick(golden.TICKS, version)
        memory.add(**tick)
        oracle.add(**tick)
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


def list_records(version: str) -> list[Record]:
    reader = open_reader(HERE / version)
    manifest = reader.manifest(2)
    files = RecordFiles(reader, manifest.files)
    return [files.read_record(ref)[0] for ref in manifest.refs]


def test_the_golden_checkpoint_has_every_kind_of_record() -> None:
    """So a change of any kind of record breaks a test."""
    records = list_records("v1") + list_records("v1_changes")
    assert {record.kind for record in records} == {"segment", "block", "dictionary", "state", "file"}
    parts = [part for record in records if record.kind == "segment" for part in record.head["parts"]]
    assert {part["kind"] for part in parts} >= {"rows", "sliced", "packed"}
    assert any("exceptions" in name for record in records for name in record.arrays)


def test_the_golden_checkpoint_of_colours_has_a_dictionary_and_columns() -> None:
    heads = [record.head for record in list_records("v1_colours") if record.kind == "block"]
    assert any(head["dictionary"] and head["codec"]["transform"] == Transform.COLOUR_COLUMNS for head in heads)


def test_the_golden_checkpoint_of_changes_has_units_of_changes_and_places() -> None:
    """It also has a dictionary, many slices per unit, and two bytes for the place of a slice."""
    blocks = [record for record in list_records("v1_changes") if record.kind == "block"]
    heads = [record.head for record in blocks]
    assert any(head["codec"]["group"] == 32 and head["codec"]["transform"] == Transform.CHANGES for head in heads)
    placed = [record for record in blocks if "places" in record.arrays]
    assert placed
    assert all(record.arrays["places"].nbytes == 2 * record.head["slices"] for record in placed)


def test_the_golden_checkpoint_of_narrow_extras_has_every_kind_of_rows() -> None:
    segments = [record for record in list_records("v1_narrow") if record.kind == "segment"]
    kinds = {part["kind"] for record in segments for part in record.head["parts"]}
    assert kinds >= {"rows", "halves", "bits"}
