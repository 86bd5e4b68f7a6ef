"""A run that the tests plan: SAC with images, whose replay buffer has 400,000 transitions."""

from __future__ import annotations

from typing import Any

from holdall.machine import Limit
from holdall.tools.plan.needs import Experience, MachineLimits, RunNeeds
from holdall.tools.probe.snapshot import FoundArray, FoundBuffer, FoundMemory, FoundModel, Snapshot, StoredSteps

MIB = 2**20
GIB = 2**30
CAPACITY = 400_000
ROW_BYTES = 42_628
STORED = StoredSteps(1000, raw_bytes=20_000, compressed_bytes=2_000, worst_bytes=2_200, working_bytes=30 * MIB)
REPLAY = Experience("model.replay_buffer", "SB3", rows=CAPACITY, n_envs=1, row_bytes=ROW_BYTES)
NEEDS = RunNeeds(
    REPLAY,
    base_bytes=300 * MIB,
    update_bytes=100 * MIB,
    settled_bytes=50 * MIB,
    update_source="measured",
    batch_size=256,
    measured_batch_size=256,
    stored=STORED,
    free_bytes=8 * GIB,
)


def limit_memory(free_bytes: int) -> MachineLimits:
    """Return the limits of a machine with `free_bytes` of free memory."""
    return MachineLimits((Limit("test", free_bytes, free_bytes),))


def make_snapshot(**changes: Any) -> Snapshot:
    """Return what a probe finds in the run."""
    model = FoundModel(
        class_name="stable_baselines3.sac.sac.SAC",
        policy_class="stable_baselines3.sac.policies.CnnPolicy",
        settings={"batch_size": 256, "buffer_size": CAPACITY},
        n_envs=1,
        device="cpu",
        observation_space={"kind": "box", "shape": [3, 84, 84], "dtype": "uint8", "low": 0.0, "high": 255.0},
        action_space={"kind": "box", "shape": [8], "dtype": "float32", "low": -1.0, "high": 1.0},
        total_timesteps=None,
        parameter_bytes=10 * MIB,
        buffer_owner="model.replay_buffer",
    )
    nbytes = CAPACITY * ROW_BYTES
    buffer = FoundBuffer(
        owner="model.replay_buffer",
        class_name="stable_baselines3.common.buffers.ReplayBuffer",
        kind="replay",
        nbytes=nbytes,
        rows=CAPACITY,
        n_envs=1,
        nbytes_now=nbytes,
        items_now=0,
        arrays=(FoundArray("observations", (CAPACITY, 1, ROW_BYTES), "uint8", nbytes),),
    )
    facts: dict[str, Any] = {"models": (model,), "buffers": (buffer,), "resident_bytes": 300 * MIB, "stored": STORED}
    return Snapshot("learn", "learn", **(facts | changes))


def make_memory(
    owner: str,
    class_name: str,
    capacity: int,
    *,
    n_envs: int = 1,
    budget: str | None = None,
    prefer: str = "balanced",
    spill_dir: str | None = None,
    transitions: int = 0,
    plain_bytes: int = 0,
) -> FoundMemory:
    """Return a memory of holdall on the host."""
    return FoundMemory(
        owner=owner,
        class_name=class_name,
        capacity=capacity,
        n_envs=n_envs,
        budget=budget,
        prefer=prefer,
        spill_dir=spill_dir,
        store_device=None,
        transitions=transitions,
        held_bytes=0,
        disk_bytes=0,
        plain_bytes=plain_bytes,
    )
