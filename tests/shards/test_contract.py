"""A memory over shards keeps the contract of all memories."""

from __future__ import annotations

from typing import Any

import pytest

from holdall import Uniform
from holdall.ray import ReplayMemory
from holdall.schema import Schema
from holdall.testing import MemoryContract, Stream
from holdall.testing.streams import StreamStep

from .desk import Desk


class TestShard(MemoryContract):
    """A shard, its writer and its learner, in one process. Rows travel in messages."""

    is_near = False

    def make_memory(self, stream: Stream) -> Any:
        schema = Schema.of(stream.observation_space, stream.action_space, None, self.num_envs)
        return Desk(schema, Uniform(), self.capacity, 0, is_near=self.is_near)

    def add(self, memory: Any, step: StreamStep) -> None:
        memory.add(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)


class TestNearShard(TestShard):
    """A shard on the machine of its learner. Rows are decoded into memory that both share."""

    is_near = True


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("cluster")
class TestMemoryOverRay(TestShard):
    """One shard in a process of its own, so that ids are those of a local memory."""

    @pytest.fixture(autouse=True)
    def _close_memories(self) -> Any:
        self._memories: list[ReplayMemory] = []
        yield
        for memory in self._memories:
            memory.close()

    def make_memory(self, stream: Stream) -> Any:
        for memory in self._memories:
            memory.close()
        spaces = (stream.observation_space, stream.action_space)
        self._memories = [ReplayMemory(*spaces, self.capacity, self.num_envs, shards=1)]
        return self._memories[0]
