"""From a draw to a batch: NumPy arrays, torch tensors, or arrays of JAX.

delivery        the contract, and helpers of all deliveries
drawn_rows      the rows of a draw, leaf by leaf
batch_builder   nests rows like their spaces
host            arrays, and tensors on the CPU
device          tensors on another device
staging         pinned memory through which arrays reach a device
words           rows of any dtype as integers
batch_source    draws ids with a memory's sampler, and makes batches
loader          batches that are made ahead
minibatches     minibatches of rollouts
"""

from __future__ import annotations

from typing import Any

from holdall.batch import find_jax_device, import_torch
from holdall.delivery.delivery import Delivery, Rows
from holdall.delivery.host import HostDelivery
from holdall.delivery.loader import Loader
from holdall.errors import ArgumentError
from holdall.schema import Schema

__all__ = ["Delivery", "HostDelivery", "Loader", "Rows", "check_device", "new_delivery"]


def new_delivery(schema: Schema, device: str | None) -> Delivery:
    """Return the delivery to `device`. Raise ArgumentError if this machine has no such device."""
    if device is None:
        return HostDelivery(schema)
    if str(device) == "jax":  # Users may pass an array, which cannot be compared with text.
        torch_device = find_jax_device()
        if torch_device is None:
            return HostDelivery(schema, "jax")
        return _new_device_delivery(schema, torch_device, is_jax=True)
    if check_device(device, "device").type == "cpu":
        return HostDelivery(schema, "cpu")
    return _new_device_delivery(schema, device, is_jax=False)


def check_device(device: str, argument: str) -> Any:
    """Return the torch device that `device` names. Raise ArgumentError if this machine does not have it."""
    torch = import_torch()
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{argument} ({device}) is not a device of torch ({error}). Use 'cpu' or 'cuda', or None for NumPy arrays."
        ) from error
    if torch_device.type == "cuda" and (torch_device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"{argument} ({device}): torch finds no such CUDA device here. Use 'cpu', or None for NumPy arrays."
        )
    if torch_device.type not in {"cpu", "cuda"}:
        try:
            torch.empty(1, device=torch_device).cpu()
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise ArgumentError(
                f"{argument} ({device}): torch finds no such device here. Use 'cpu', or None for NumPy arrays."
            ) from error
    return torch_device


def _new_device_delivery(schema: Schema, device: str, *, is_jax: bool) -> Delivery:
    from holdall.delivery.device import DeviceDelivery  # noqa: PLC0415  It imports torch.

    return DeviceDelivery(schema, device, is_jax=is_jax)
