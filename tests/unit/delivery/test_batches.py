"""A batch belongs to the caller, as arrays or as tensors."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from holdall import ArgumentError, MissingPackageError, ReplayMemory
from holdall.testing import LeafPlan, Stream, assert_same_bits
from holdall.testing.oracle import as_array, map_leaves
from holdall.testing.strategies import DTYPES, box


def make_memory(**options: Any) -> ReplayMemory:
    stream = Stream(
        spaces.Dict(image=box((4, 84, 84), "u1"), state=box((7,), "f4")), spaces.Discrete(3), plans=[LeafPlan(axis=0)]
    )
    memory = ReplayMemory(stream.observation_space, stream.action_space, 200, seed=0, **options)
    memory.extend(**stream.ticks(200).arguments())
    return memory


@pytest.mark.parametrize("device", [None, "cpu"])
def test_ten_batches_do_not_change_while_a_hundred_are_drawn(device: str | None) -> None:
    """The rule holds for batches, and for views whose batch was deleted."""
    memory = make_memory(device=device)
    held = [memory.sample(32) for _ in range(10)]
    copies = [_copy_fields(batch) for batch in held]
    views = [memory.sample(32).next_obs["image"][3:9, 1:] for _ in range(3)]
    view_copies = [np.array(as_array(view)) for view in views]
    for _ in range(100):
        batch = memory.sample(32)
        # The owner of a batch may write to it.
        map_leaves(lambda leaf: leaf.__setitem__(..., 0), (batch.obs, batch.next_obs))
    for batch, copy in zip(held, copies, strict=True):
        assert_same_bits(_copy_fields(batch), copy)
    for view, view_copy in zip(views, view_copies, strict=True):
        assert_same_bits(view, view_copy)


def test_batches_outlive_the_memory() -> None:
    """Closing the memory does not change a batch."""
    memory = make_memory()
    batch = memory.sample(64)
    copy = _copy_fields(batch)
    memory.close()
    del memory
    gc.collect()
    assert_same_bits(_copy_fields(batch), copy)


def test_writing_to_a_batch_does_not_change_the_memory() -> None:
    """The arrays of large fields, small fields and ids are copies."""
    memory = make_memory()
    ids = np.arange(20)
    first = memory.gather(ids)
    copy = _copy_fields(first)
    map_leaves(lambda leaf: leaf.__setitem__(..., 1), (first.obs, first.next_obs, first.action, first.reward))
    first.terminated[:] = True
    first.truncated[:] = True
    first.ids[:] = 3
    first.weights[:] = 9
    assert_same_bits(_copy_fields(memory.gather(np.arange(20))), copy)
    assert ids.tolist() == list(range(20))


def _copy_fields(batch: Any) -> dict[str, Any]:
    names = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "ids", "weights")
    copied: dict[str, Any] = map_leaves(
        lambda leaf: np.array(as_array(leaf)), {name: getattr(batch, name) for name in names}
    )
    return copied


# ---------------------------------------------------------------- delivery


def test_tensors_have_the_bytes_and_dtypes_of_the_arrays() -> None:
    """A batch of tensors on the CPU has the leaves of the NumPy batch. Its ids are a NumPy array."""
    arrays = make_memory()
    tensors = make_memory(device="cpu")
    ids = np.arange(0, 200, 3)
    batch = tensors.gather(ids)
    assert_same_bits(batch, arrays.gather(ids))
    assert isinstance(batch.ids, np.ndarray)
    for leaf in (batch.obs["image"], batch.obs["state"], batch.action, batch.reward, batch.terminated, batch.weights):
        assert isinstance(leaf, torch.Tensor)
        assert leaf.device.type == "cpu"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_returned_as_a_tensor(dtype: np.dtype[Any]) -> None:
    """The rule also holds for unsigned integers, half precision and booleans."""
    stream = Stream(box((3, 700), dtype), box((2,), dtype), seed=1)
    memory = ReplayMemory(stream.observation_space, stream.action_space, 50, device="cpu")
    steps = stream.ticks(20)
    memory.extend(**steps.arguments())
    batch = memory.gather(np.arange(20))
    assert isinstance(batch.obs, torch.Tensor)
    assert_same_bits(batch.obs, steps.obs[:, 0])
    assert_same_bits(batch.action, steps.action[:, 0])


@pytest.mark.parametrize("where", ["device", "store_device"])
def test_a_dtype_that_torch_does_not_have_is_refused_by_the_constructor(where: str) -> None:
    """The refusal comes from the constructor, before any data is added."""
    with pytest.raises(ArgumentError, match=r"torch has no dtype for the space \(.*float128\)\. Use device=None"):
        ReplayMemory(box((3,), np.longdouble), spaces.Discrete(2), 50, **{where: "cpu"})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["toaster", 3.5, "cuda:x"], ids=str)
def test_an_unknown_device_is_refused(device: Any) -> None:
    """The refusal names the device, and devices that can be used."""
    with pytest.raises(ArgumentError) as refusal:
        make_memory(device=device)
    assert str(refusal.value).startswith(f"device ({device}) is not a device of torch")
    assert str(refusal.value).endswith("Use 'cpu' or 'cuda', or None for NumPy arrays.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_cuda_device_is_refused_by_the_constructor() -> None:
    with pytest.raises(
        ArgumentError, match=r"^device \(cuda\): torch finds no such CUDA device here. Use 'cpu', or None"
    ):
        make_memory(device="cuda")


def test_a_missing_torch_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are an extra. The error says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingPackageError, match=r"^device is given, but torch is not installed. Run .*holdall\[torch\]"
    ):
        make_memory(device="cpu")


def test_a_missing_jax_is_named_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingPackageError, match=r"^device='jax' needs jax, .*holdall\[jax\].*or use device=None"):
        make_memory(device="jax")
    with make_memory() as memory, pytest.raises(MissingPackageError, match=r"needs jax, .*holdall\[jax\]"):
        memory.sample(1).jax()


def test_numpy_batches_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, torch is never imported."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert make_memory().sample(3).obs["image"].shape == (3, 4, 84, 84)
