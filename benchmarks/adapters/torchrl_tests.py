"""Run TorchRL's own tests of its replay buffers: with LazyTensorStorage, and with HoldallStorage in its place.

    python benchmarks/adapters/torchrl_tests.py FOLDER [--file test_storages.py] [--json FILE]

FOLDER is a checkout of TorchRL's repository, because TorchRL's packages do not contain the tests. A test counts as
passed only if it made such a storage. LEFT_OUT names the tests that are not run, each with the reason. The exit status
is 1 if a test fails with HoldallStorage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, store
from shared.process import emit

FILES = ("test_storages.py", "test_writers.py", "test_prioritized.py", "test_samplers.py", "test_rb_core.py")
PROCESSES = "shares a storage between processes, which HoldallStorage refuses"
COMPILED = "compilable=True, which HoldallStorage refuses"
NEW_KEYS = "writes keys that the first data did not have, which HoldallStorage refuses"
NOT_TENSORS = "pytrees, and text in a tensorclass, which HoldallStorage refuses"
LEFT_OUT = {
    r"TestStorages::test__rand_given_ndim_recompile": COMPILED,
    r"TestStorages::test_compilable_storage_set_fullgraph": COMPILED,
    r"TestStorages::test_extend_lazystack\[LazyTensorStorage\]": "elements of different shapes",
    r"TestStorages::test_extend_lazystack_direct_write\[LazyTensorStorage\]": "asks how a storage writes, not what",
    r"TestStorages::test_storage_state_dict\[torch-(True|False)-memmap-tensor\]": "loads the state of a HoldallStorage "
    "into a LazyMemmapStorage, which cannot read it",
    r"TestStorages::test_storage_dumps_loads\[(True|False)-(tc|pytree)-LazyTensorStorage-device_data0\]": NOT_TENSORS,
    r"TestStorages::test_storage_dumps_loads\[False-tensor-LazyTensorStorage-device_data0\]": "expects an error of "
    "LazyTensorStorage; HoldallStorage loads the tensor",
    r"TestStorages::test_storage_inplace_writing_newkey\[LazyTensorStorage-None\]": NEW_KEYS,
    r"TestLazyStorages::test_extend_list_pytree\[LazyTensorStorage-shape\d-1000\]": NOT_TENSORS,
    r"TestSharedStorageInit::test_mutation_revision_shared_across_processes": PROCESSES,
    r"TestSharedStorageInit::test_sequence_boundary_cache_invalidated_across_processes": PROCESSES,
    r"TestSharedStorageInit::test_shared_storage_multiprocess\[LazyTensorStorage-(True|False)\]": PROCESSES,
    r"TestSharedStorageInit::test_shared_init_reconciles_non_cpu_device": PROCESSES,
    r"test_replay_buffer_read_write_all_in_order": NEW_KEYS,
    r"test_replay_buffer_read_write_all_in_order_matches_full_slice_ndim2": NEW_KEYS,
    r"test_replay_buffer_prefetch_autograd_roundtrip\[(True|False)-(state_dict|pickle)\]": "makes no such storage, "
    "and failed in one of two runs",
    r"test_storage_mutation_revision_for_buffer_write_paths": "asks how often a write of some keys is counted",
    r"TestUpdateIfPresent::test_never_written_slot_is_stale": "reads a position that was never written; "
    "HoldallStorage raises IndexError",
    r"TestUpdateIfPresent::test_concurrent_updates_do_not_tear_records": "reads a slice without the buffer's lock "
    "while another thread writes; HoldallStorage reads slices key by key, when they are used",
}
"""Pattern of the whole name of a test and its case, and why it is not run on either side."""
NO_EXTENSION = r".*(Sum|Min)SegmentTreeFp(32|64) is not available.*"
"""The error of tests that need TorchRL's compiled extension where it cannot be loaded."""
NO_EXTENSION_REASON = "needs TorchRL's compiled extension, which could not be loaded"
SIDES = ("LazyTensorStorage", "HoldallStorage")
MODULES = ("torchrl.data", "torchrl.data.replay_buffers", "torchrl.data.replay_buffers.storages")
MAX_TEST_S = 60
KINDS = ("passed", "failed", "left_out", "skipped")


class Outcomes:
    """Plugin for pytest that collects the outcome of every test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.num_other_storages = 0
        self.num_made = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove the tests that are left out."""
        for item in items:
            name = item.nodeid.partition("::")[2]
            reason = find_reason(name)
            if reason is not None:
                self.left_out[name] = reason
        items[:] = [item for item in items if item.nodeid.partition("::")[2] not in self.left_out]

    def pytest_runtest_setup(self) -> None:
        """Begin to count the storages that a test makes."""
        self.num_made = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a phase of a test."""
        name = report.nodeid.partition("::")[2]
        if report.failed:
            message = str(report.longrepr)
            if re.search(NO_EXTENSION, message):
                self.left_out[name] = NO_EXTENSION_REASON
            else:
                self.failed[name] = message.splitlines()[-1]
        elif report.skipped:
            self.skipped[name] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.when == "call" and self.num_made:
            self.passed.append(name)
        elif report.when == "call":
            self.num_other_storages += 1


def find_reason(name: str) -> str | None:
    """Return why a test is left out. None if it is run."""
    return next((reason for pattern, reason in LEFT_OUT.items() if re.fullmatch(pattern, name)), None)


def run_tests(folder: Path, file: str, side: str) -> dict[str, Any]:
    """Run the tests of a file in this process."""
    outcomes = Outcomes()
    modules = [importlib.import_module(name) for name in MODULES]
    replaced: Any = modules[-1].LazyTensorStorage
    if side == "HoldallStorage":
        kind = importlib.import_module("holdall.torchrl").HoldallStorage
        # The names of the cases contain the name of the class.
        replaced = type("LazyTensorStorage", (kind,), {})
        for module in modules:
            module.LazyTensorStorage = replaced  # type: ignore[attr-defined]  # modules have no types
    make = replaced.__init__

    def count_and_make(storage: Any, *args: Any, **named: Any) -> None:
        outcomes.num_made += type(storage) is replaced
        make(storage, *args, **named)

    replaced.__init__ = count_and_make
    os.chdir(folder / "test" / "rb")
    sys.path[:0] = [str(folder / "test"), str(folder / "test" / "rb")]
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", f"--timeout={MAX_TEST_S}"]
    status = pytest.main([file, *options], [outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest could not run {file} in {folder} (status {status})")
    return {
        "passed": outcomes.passed,
        "failed": outcomes.failed,
        "left_out": outcomes.left_out,
        "skipped": outcomes.skipped,
        "passed_with_other_storages": outcomes.num_other_storages,
    }


def describe_version(folder: Path) -> dict[str, str]:
    """Return the version in a checkout, and its commit."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"version": (folder / "version.txt").read_text(encoding="utf-8").strip(), "commit": done.stdout.strip()}


def measure(folder: Path, file: str) -> dict[str, Any]:
    """Run the tests of a file on both sides, each in a process, and print the counts."""
    sides: dict[str, Any] = {}
    for side in SIDES:
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--file", file, "--side", side]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sides[side] = json.loads(done.stdout.splitlines()[-1])["result"]
        counts = ", ".join(f"{len(sides[side][kind])} {kind}" for kind in KINDS)
        print(f"{file} {side}: {counts}", file=sys.stderr)
        for name, message in sides[side]["failed"].items():
            print(f"  {name}: {message}", file=sys.stderr)
    return sides


def figures_of(file: str, sides: dict[str, Any]) -> list[Figure]:
    """Return the number of tests by outcome, and why tests were left out."""
    figures = []
    for side in SIDES:
        case = f"{side}: {file}"
        left_out = list(sides[side]["left_out"].values())
        without_extension = left_out.count(NO_EXTENSION_REASON)
        figures += [
            Figure(case, "passed", "", len(sides[side]["passed"])),
            Figure(case, "failed", "", len(sides[side]["failed"]), "0" if side == SIDES[-1] else None),
            Figure(case, "left out by name", "", len(left_out) - without_extension),
            Figure(case, "need TorchRL's compiled extension", "", without_extension),
        ]
    return figures


def main() -> int:
    """Run the tests. Return 1 if one fails with HoldallStorage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of TorchRL's repository")
    parser.add_argument("--file", choices=FILES, metavar="NAME", help="only this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.side is not None:
        emit({"result": run_tests(folder, arguments.file, arguments.side)})
        return 0
    run = {file: measure(folder, file) for file in ([arguments.file] if arguments.file else FILES)}
    if arguments.json is not None:
        described = describe_run({"tests": describe_version(folder)}, ("torchrl", "tensordict"))
        for file, sides in run.items():
            store(arguments.json, figures_of(file, sides), described)
    return 1 if any(sides["HoldallStorage"]["failed"] for sides in run.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
