"""The processes of shards, which tests kill and freeze, and handles with other settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from holdall.cluster.config import ClusterSettings, MemoryConfig
from holdall.cluster.tuning import ClusterTuning
from holdall.delivery import new_delivery
from holdall.errors import ShardError
from holdall.ray import MemoryHandle, Writer
from holdall.sampling import Uniform, new_generator

PATIENCE_S = 120.0


def make_config(schema_json: dict[str, Any], rows: int, url: Path, **tuned: Any) -> MemoryConfig:
    """Return the settings of a memory with journals, for a shard in this process."""
    settings = ClusterSettings(durability="segment", url=str(url), tuning=ClusterTuning(**tuned))
    return MemoryConfig(schema_json, "nobody", Uniform(), rows, 1, settings)


def find_process(shard: Any) -> int:
    """Return the id of the process that a shard's actor runs in."""
    return int(ray.get(shard.__ray_call__.remote(lambda _: os.getpid())))


def forget_all(memory: Any) -> None:
    """Drop everything that the shards hold, so that tests can share a memory. Row numbers continue."""
    for number in memory._members.numbers:
        shard = memory._members.handle(number)
        ray.get(shard.__ray_call__.remote(lambda it: it._data.start_at(it._data.store.next_row)))
    memory._members.refresh()


def kill(process: int) -> None:
    """Kill a process with SIGKILL."""
    psutil.Process(process).kill()


def wait_until(is_so: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until `is_so` returns True. Raise TimeoutError after `patience_s`."""
    until = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError("the condition never became true")
        time.sleep(0.05)


def change_settings(memory: MemoryHandle, **changes: Any) -> MemoryConfig:
    """Return the configuration of a memory with some other settings, see `ClusterSettings`."""
    config = memory._config
    return replace(config, settings=replace(config.settings, **changes))


def make_writer(memory: MemoryHandle, num_envs: int = 1, **changes: Any) -> Writer:
    """Return a writer of a memory with some other settings, see `ClusterSettings`."""
    return Writer(change_settings(memory, **changes), num_envs)


def make_impatient_writer(memory: MemoryHandle) -> Writer:
    """Return a writer that waits for a shard for a tenth of a second."""
    return make_writer(memory, patience_s=None, tuning=ClusterTuning(writer_patience_s=0.1))


def make_handle(memory: MemoryHandle, **changes: Any) -> MemoryHandle:
    """Return another handle of a memory, with some other settings, see `ClusterSettings`."""
    config = change_settings(memory, **changes)
    return MemoryHandle(config, memory.sampler, new_generator(0), None, new_delivery(memory.schema, None), seeds=True)


def repeat_until_accepted(call: Callable[[], Any]) -> None:
    """Repeat a call of a writer until the shards accept it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            call()
        except ShardError:
            if time.monotonic() > until:
                raise
        else:
            return
