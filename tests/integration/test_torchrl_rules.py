"""TorchRL's own tests of its replay buffers, with HoldallStorage in the place of LazyTensorStorage.

They are not shipped. HOLDALL_TORCHRL_TESTS names the folder `test` of TorchRL's repository, of the installed version.
Left out are tests of other storages, of sharing between processes, of torch.compile and of Ray, tests that fail with
LazyTensorStorage, too, and what a HoldallStorage refuses: see REFUSED.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = os.environ.get("HOLDALL_TORCHRL_TESTS", "")
FILES = ("test_storages.py", "test_writers.py", "test_prioritized.py", "test_samplers.py", "test_rb_core.py")
LEFT_OUT = (
    "process", "shared", "cleanup", "compil", "ray", "distributed", "memmap", "ListStorage", "multi_thread", "prefetch",
)  # fmt: skip
REFUSED = {
    "test_extend_lazystack": "elements of different shapes",
    "test_extend_lazystack_direct_write": "asks how LazyTensorStorage writes, not what",
    "test_storage_dumps_loads": "pytrees, and text in a tensorclass",
    "test_storage_inplace_writing_newkey": "keys that the first data did not have",
    "test_extend_list_pytree": "pytrees",
    "test_replay_buffer_read_write_all_in_order": "keys that the first data did not have",
    "test_replay_buffer_read_write_all_in_order_matches_full_slice_ndim2": "keys that the first data did not have",
    "test_storage_mutation_revision_for_buffer_write_paths": "asks how often a write is counted",
    "test_never_written_slot_is_stale": "reads a position that was never written",
    "test_concurrent_updates_do_not_tear_records": "reads a slice, key by key, without the buffer's lock",
}
PLUGIN = """
import torchrl.data, torchrl.data.replay_buffers, torchrl.data.replay_buffers.storages
from holdall.torchrl import HoldallStorage

class LazyTensorStorage(HoldallStorage):
    pass

for module in (torchrl.data, torchrl.data.replay_buffers, torchrl.data.replay_buffers.storages):
    module.LazyTensorStorage = LazyTensorStorage
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TESTS, reason="HOLDALL_TORCHRL_TESTS does not name TorchRL's tests")
@pytest.mark.parametrize("file", FILES)
def test_torchrls_own_tests_hold(file: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    (tmp_path / "in_place_of_lazy_tensors.py").write_text(PLUGIN)
    ours = find_failures(file, tmp_path, "-p", "in_place_of_lazy_tensors")
    theirs = find_failures(file, tmp_path)
    assert {name.split("[")[0] for name in ours - theirs} <= REFUSED.keys()


def find_failures(file: str, folder: Path, *options: str) -> set[str]:
    """Run the tests of a file, and return the names of those that fail, with their cases."""
    chosen = " and ".join(f"not {word}" for word in LEFT_OUT)
    command = [
        sys.executable, "-m", "pytest", "-q", *options, "-p", "no:cacheprovider", "-W", "ignore", "--tb=line",
        "-k", chosen, str(Path(TESTS, "rb", file)),
    ]  # fmt: skip
    paths = filter(None, [str(folder), TESTS, *sys.path])
    done = subprocess.run(
        command, cwd=Path(TESTS, "rb"), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]
    return set(re.findall(r"^FAILED \S+::(test_\w+(?:\[\S*\])?)", done.stdout, re.MULTILINE))
