"""What users may rely on: the names that holdall exports, and what importing it costs."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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

PACKAGES = ["holdall", "holdall.sb3", "holdall.ray"]
"""Packages that import their names when they are first used."""

HEAVY = ["ray", "rich", "stable_baselines3", "torch", "typer"]


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(holdall.__all__) == sorted(PUBLIC)


def test_every_public_name_exists() -> None:
    for name in holdall.__all__:
        assert hasattr(holdall, name), name


def list_declared_names(package: ModuleType) -> dict[str, str]:
    """Return the names that a package imports for type checkers, and their modules."""
    source = Path(package.__file__ or "").read_text()
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    block = next(node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_and_programs_see_the_same_names(name: str) -> None:
    package = pytest.importorskip(name)
    declared = list_declared_names(package)
    assert set(package.__all__) <= set(declared)
    for public, module in declared.items():
        assert getattr(package, public) is getattr(importlib.import_module(module), public)
    objects = {public: getattr(package, public) for public in dir(package) if not public.startswith("_")}
    ours = {public for public, value in objects.items() if getattr(value, "__module__", "").startswith("holdall.")}
    used_by_the_packages = {"MissingPackageError", "attach_names"}
    assert ours - used_by_the_packages <= set(declared)


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
        "host_store",
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
    """All modules are used in one process, so that torch is imported once. No module imports the next one."""
    program = "import holdall, sys"
    for use in USES:
        program += f"\nprint('holdall.{use.split('.')[0]}' in sys.modules, callable(holdall.{use}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False True"] * len(USES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        holdall.nothing  # type: ignore[attr-defined]  # noqa: B018  This raises the error.


def test_the_version_is_the_installed_one() -> None:
    assert holdall.__version__ == importlib.metadata.version("holdall")
