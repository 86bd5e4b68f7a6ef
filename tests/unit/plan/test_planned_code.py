"""The lines that a plan writes for its reader to paste."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.tools.plan.code import write_model_code
from holdall.tools.plan.needs import HoldallUse
from holdall.tools.plan.planner import plan_snapshot

from .runs import GIB, MIB, NEEDS, REPLAY, limit_memory, make_memory, make_snapshot


def test_the_spill_dir_is_written_unchanged() -> None:
    needs = NEEDS.with_holdall_buffer(HoldallUse(GIB, prefer="memory", spill_dir="/mnt/null"))
    assert '"spill_dir": "/mnt/null"}' in write_model_code("SAC", "CnnPolicy", needs)


def test_a_loop_with_one_of_holdalls_memories_gets_the_lines_of_that_memory() -> None:
    lines = {}
    for name in ("ReplayMemory", "RolloutMemory"):
        memory = make_memory("memory", f"holdall.memory.{name}", 512, n_envs=4, budget="1GiB", prefer="memory")
        plan = plan_snapshot(make_snapshot(models=(), buffers=(), memories=(memory,)), None, limit_memory(8 * GIB))
        lines[name] = [line.strip(" ,") for line in plan.code.splitlines()[3:-1]]
        assert plan.code.startswith(f"memory = holdall.{name}(")
    assert lines["ReplayMemory"] == ["capacity=512", "num_envs=4", 'budget="1.0 GiB"', 'prefer="memory"']
    assert lines["RolloutMemory"] == ["num_steps=128", "num_envs=4"]


@pytest.mark.parametrize("library", ["stable_baselines3.common.buffers.ReplayBuffer", "holdall.cleanrl.ReplayBuffer"])
def test_a_loop_with_cleanrls_buffer_gets_the_lines_of_holdalls(library: str) -> None:
    snapshot = make_snapshot(models=())
    if library.startswith("holdall"):
        memory = make_memory("rb", library, 400_000, budget="auto", transitions=10, plain_bytes=400_000)
        plan = plan_snapshot(replace(snapshot, buffers=(), memories=(memory,)), None, limit_memory(1700 * MIB))
    else:
        buffer = replace(snapshot.buffers[0], owner="rb", class_name=library)
        plan = plan_snapshot(replace(snapshot, buffers=(buffer,)), None, limit_memory(3 * GIB))
    assert plan.change is not None
    assert plan.code == (
        "from holdall.cleanrl import ReplayBuffer\n"
        "rb = ReplayBuffer(\n    400_000,\n    ...,  # the other arguments stay\n    budget=None,\n)"
    )


def test_a_loop_with_torchrls_buffer_gets_the_lines_of_holdalls_storage() -> None:
    memory = make_memory(
        "storage", "holdall.torchrl.HoldallStorage", 1_000, budget="1GiB", prefer="memory", spill_dir="disk"
    )
    plan = plan_snapshot(make_snapshot(models=(), buffers=(), memories=(memory,)), None, limit_memory(8 * GIB))
    assert plan.code.splitlines() == [
        "from holdall.torchrl import HoldallStorage",
        'storage = HoldallStorage(1_000, budget="1.0 GiB", prefer="memory", spill_dir="disk")',
    ]


@pytest.mark.parametrize(
    ("algorithm", "policy", "first", "last"),
    [
        ("PPO", "CnnPolicy", "from holdall.sb3 import RolloutBuffer", ")"),
        ("MaskablePPO", "MlpPolicy", "from holdall.sb3.contrib import MaskableRolloutBuffer", ")"),
        ("MaskablePPO", "MultiInputPolicy", "from holdall.sb3.contrib import MaskableDictRolloutBuffer", ")"),
        ("RecurrentPPO", "MlpLstmPolicy", "from holdall.sb3.contrib import equip", "equip(model)"),
    ],
)
def test_every_algorithm_gets_the_lines_of_its_own_rollout_buffer(
    algorithm: str, policy: str, first: str, last: str
) -> None:
    needs = replace(NEEDS, experience=replace(REPLAY, rows=512, is_rollout=True)).with_holdall_buffer()
    lines = write_model_code(algorithm, policy, needs).splitlines()
    assert lines[0] == first
    assert lines[-1].endswith(last)
    assert ("rollout_buffer_class=" in "".join(lines)) == (algorithm != "RecurrentPPO")
