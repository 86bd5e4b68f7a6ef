"""What users may rely on: the names that holdall exports, and what importing it costs."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest
from gymnasium import spaces

import holdall

PUBLIC = [
    "ArgumentError",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "DamageError",
    "Dataset",
    "FencedError",
    "FieldReport",
    "Hindsight",
    "HoldallError",
    "MemoryReport",
    "MissingPackageError",
    "NStep",
    "Prioritized",
    "Recorder",
    "ReplayMemory",
    "Sequence",
    "RolloutBatch",
    "RolloutMemory",
    "SaveHandle",
    "ShardError",
    "SharedObservations",
    "SpaceError",
    "TransitionIdError",
    "Uniform",
    "threads",
]

HEAVY = ["ray", "rich", "stable_baselines3", "torch", "typer"]


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(holdall.__all__) == sorted(PUBLIC)


def test_every_public_name_exists() -> None:
    for name in holdall.__all__:
        assert hasattr(holdall, name), name


def test_the_methods_and_attributes_of_a_memory_are_these_and_no_others() -> None:
    memory = holdall.ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), 10)
    assert sorted(name for name in dir(memory) if not name.startswith("_")) == [
        "add",
        "are_valid",
        "attached",
        "batch_source",
        "capacity",
        "close",
        "disk_bytes",
        "extend",
        "fill",
        "first_id",
        "gather",
        "load",
        "loader",
        "next_id",
        "num_envs",
        "relieve",
        "report",
        "sample",
        "sampler",
        "save",
        "save_every",
        "schema",
        "set_flags",
        "spill_dir",
        "store",
        "update",
        "update_priorities",
    ]
    memory.close()


def test_the_names_for_stable_baselines3_are_these_and_no_others() -> None:
    sb3 = pytest.importorskip("holdall.sb3")
    assert sorted(sb3.__all__) == [
        "CheckpointCallback",
        "HerReplayBuffer",
        "LintCallback",
        "PrioritizedDQN",
        "PrioritizedReplay",
        "PrioritizedReplayBuffer",
        "ReplayBuffer",
        "RolloutBuffer",
        "WatchCallback",
        "resume",
    ]


def test_the_names_over_shards_are_these_and_no_others() -> None:
    pytest.importorskip("ray")
    names = importlib.import_module("holdall.ray").__all__
    assert names == ["Collection", "MemoryHandle", "RateLimit", "ReplayMemory", "Writer", "attach", "collect"]


def test_import_holdall_imports_nothing_heavy() -> None:
    program = f"import holdall, sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_adapters_import_no_tool() -> None:
    pytest.importorskip("stable_baselines3")
    program = (
        "import sys; from holdall.sb3 import ReplayBuffer, HerReplayBuffer, RolloutBuffer, CheckpointCallback\n"
        "print(*[name for name in sys.modules if name.startswith(('holdall.tools', 'holdall.watch', 'holdall.lint'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


USES = (
    "plan.model",
    "lint.model",
    "elegantrl.TrajectoryBuffer",
    "lerobot.ReplayBuffer",
    "drqv2.ReplayBufferStorage",
    "sb3.ReplayBuffer",
    "torchrl.HoldallStorage",
    "dreamer.Replay",
)


def test_a_module_is_imported_when_it_is_first_asked_for() -> None:
    """All in one process, which imports torch once. None of them brings the next."""
    program = "import holdall, sys"
    for use in USES:
        program += f"\nprint('holdall.{use.split('.')[0]}' in sys.modules, callable(holdall.{use}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False True"] * len(USES)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        holdall.nothing  # type: ignore[attr-defined]  # noqa: B018  that is the point


def test_the_version_is_the_installed_one() -> None:
    assert holdall.__version__ == importlib.metadata.version("holdall")
