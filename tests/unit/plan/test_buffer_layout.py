"""Bytes of Stable-Baselines3's buffers: ours against the arrays that it really allocates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.plan.spec import (
    BufferLayout,
    default_class,
    installed_version,
    leaves_of,
    parse_version,
    replay_buffer,
    rollout_buffer,
)

_DTYPES = (np.uint8, np.float32, np.float64, np.int16, np.float16, np.int8)


def _box(rng: np.random.Generator) -> spaces.Box:
    dtype = _DTYPES[rng.integers(len(_DTYPES))]
    shapes = [(3,), (84, 84, 4), (1, 36, 48), (17,), (2, 5), ()]
    low, high = (0, 100) if np.issubdtype(dtype, np.integer) else (-1.0, 1.0)
    return spaces.Box(low, high, shapes[rng.integers(len(shapes))], dtype)


def _leaf_space(rng: np.random.Generator) -> spaces.Space[Any]:
    others = [spaces.Discrete(7), spaces.MultiDiscrete([3, 4, 5]), spaces.MultiBinary(6), spaces.MultiBinary([2, 3])]
    return _box(rng) if rng.random() < 0.7 else others[rng.integers(len(others))]


def _action(rng: np.random.Generator) -> spaces.Space[Any]:
    kinds: list[spaces.Space[Any]] = [
        spaces.Box(-1, 1, (8,), np.float32),
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Discrete(4),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(5),
    ]
    return kinds[rng.integers(len(kinds))]


def _dict(rng: np.random.Generator, keys: tuple[str, ...]) -> spaces.Dict:
    return spaces.Dict({key: _leaf_space(rng) for key in keys})


def _configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw ten configurations of every buffer class, among them each of its switches."""
    rng = np.random.default_rng(7)
    for number in range(10):
        sizes = {"size": int(rng.integers(1, 400)), "n_envs": int(rng.choice([1, 2, 3, 4, 16]))}
        goals = _dict(rng, ("observation", "achieved_goal", "desired_goal"))
        optimised = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        yield (
            "ReplayBuffer",
            sizes | {"obs": _leaf_space(rng), "action": _action(rng)} | (optimised if number % 2 else {}),
        )
        yield "NStepReplayBuffer", sizes | {"obs": _box(rng), "action": _action(rng)}
        untimed = {"handle_timeout_termination": bool(number % 2)}
        yield "DictReplayBuffer", sizes | {"obs": _dict(rng, ("image", "vector")), "action": _action(rng)} | untimed
        yield "HerReplayBuffer", sizes | {"obs": goals, "action": _action(rng)}
        yield "RolloutBuffer", sizes | {"obs": _leaf_space(rng), "action": _action(rng)}
        yield "DictRolloutBuffer", sizes | {"obs": _dict(rng, ("a", "b", "c")), "action": _action(rng)}


def _ours(buffer_class: str, given: dict[str, Any]) -> BufferLayout:
    switches = {name: value for name, value in given.items() if name not in {"size", "n_envs", "obs", "action"}}
    (action,) = leaves_of(given["action"], "action")
    build = rollout_buffer if "Rollout" in buffer_class else replay_buffer
    return build(
        leaves_of(given["obs"], "obs"),
        action,
        given["size"],
        given["n_envs"],
        buffer_class=buffer_class,
        sb3=installed_version(),
        **switches,
    )


def _theirs(buffer_class: str, given: dict[str, Any]) -> Any:
    from stable_baselines3.common import buffers
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

    known = {**vars(buffers), "HerReplayBuffer": HerReplayBuffer}
    rest = {name: value for name, value in given.items() if name not in {"size", "obs", "action"}}
    if buffer_class == "HerReplayBuffer":
        rest["env"] = None
    return known[buffer_class](given["size"], given["obs"], given["action"], device="cpu", **rest)


def _arrays(buffer: Any) -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in vars(buffer).items():
        if isinstance(value, np.ndarray):
            found[name] = value
        elif isinstance(value, dict) and name.endswith("observations"):
            found |= {f"{name}.{key}": array for key, array in value.items()}
    return found


@pytest.mark.parametrize(("buffer_class", "given"), list(_configurations()))
def test_every_array_has_the_bytes_that_stable_baselines3_allocates(buffer_class: str, given: dict[str, Any]) -> None:
    pytest.importorskip("stable_baselines3")
    layout = _ours(buffer_class, given)
    real = _theirs(buffer_class, given)
    arrays = _arrays(real)
    assert {a.name: (a.nbytes, a.dtype) for a in layout.arrays} == {n: (a.nbytes, a.dtype) for n, a in arrays.items()}
    objects = sum(sys.getsizeof(item) for array in arrays.values() if array.dtype == object for item in array.flat)
    assert layout.object_bytes == objects
    assert layout.nbytes == sum(array.nbytes for array in arrays.values()) + objects
    assert layout.rows == real.buffer_size


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("is_dict", [False, True])
def test_flattening_holds_the_largest_array_twice_unless_there_is_one_environment(n_envs: int, is_dict: bool) -> None:
    pytest.importorskip("stable_baselines3")
    box = spaces.Box(0, 255, (6, 8, 3), np.uint8)
    obs = spaces.Dict({"image": box, "vector": spaces.Box(-1, 1, (5,), np.float32)}) if is_dict else box
    buffer_class = default_class(on_policy=True, is_dict=is_dict)
    given = {"obs": obs, "action": spaces.Discrete(3), "size": 12, "n_envs": n_envs}
    layout, real = _ours(buffer_class, given), _theirs(buffer_class, given)
    before = _arrays(real)
    real.full = True
    next(real.get(4))
    copied = [array for name, array in _arrays(real).items() if not np.shares_memory(array, before[name])]
    assert layout.flatten_bytes == max((array.nbytes for array in copied), default=0)


def test_rollouts_up_to_2_7_0_are_float32() -> None:
    obs = leaves_of(spaces.Box(0, 255, (144, 160, 12), np.uint8), "obs")
    (action,) = leaves_of(spaces.Discrete(8), "action")
    old, new = (rollout_buffer(obs, action, 8192, 2, sb3=sb3) for sb3 in [(2, 7, 0), (2, 7, 1)])
    assert new.arrays[0].nbytes == 4_529_848_320
    assert old.arrays[0].nbytes == 4 * new.arrays[0].nbytes
    assert (old.arrays[1].dtype.name, new.arrays[1].dtype.name) == ("float32", "int64")


def test_replays_before_2_1_0_keep_float64_actions() -> None:
    obs = leaves_of(spaces.Box(-1, 1, (3,), np.float32), "obs")
    (action,) = leaves_of(spaces.Box(-1, 1, (4,), np.float64), "action")
    old, new = (replay_buffer(obs, action, 100, sb3=sb3) for sb3 in [(2, 0, 0), (2, 1, 0)])
    assert old.nbytes - new.nbytes == 100 * 4 * 4


def test_pages_that_no_row_was_written_to_are_not_resident() -> None:
    obs = leaves_of(spaces.Box(-1, 1, (3,), np.float32), "obs")
    (action,) = leaves_of(spaces.Discrete(4), "action")
    layout = replay_buffer(obs, action, 1000, 4, handle_timeout_termination=False)
    assert layout.resident_bytes() == layout.nbytes - 1000 * 4
    assert layout.resident_bytes(100) * 10 == layout.resident_bytes()
    assert layout.resident_bytes(10**9) == layout.resident_bytes()


def test_the_rest_of_a_division_by_the_environments_is_not_stored() -> None:
    obs = leaves_of(spaces.Box(-1, 1, (3,), np.float32), "obs")
    (action,) = leaves_of(spaces.Discrete(4), "action")
    assert replay_buffer(obs, action, 10, 4).transitions == 8
    assert replay_buffer(obs, action, 2, 4).transitions == 4


@pytest.mark.parametrize(
    ("buffer_class", "switches", "named"),
    [
        ("ReplayBuffer", {"optimize_memory_usage": True}, "handle_timeout_termination"),
        ("NStepReplayBuffer", {"optimize_memory_usage": True}, "optimize_memory_usage"),
        ("NStepReplayBuffer", {"sb3": (2, 6, 0)}, "2.7.0"),
        ("ReplayBuffer", {"sb3": (1, 8, 0)}, "2.0.0"),
        ("Replay", {}, "buffer_class"),
    ],
)
def test_what_stable_baselines3_refuses_is_refused(buffer_class: str, switches: dict[str, Any], named: str) -> None:
    obs = leaves_of(spaces.Box(-1, 1, (3,), np.float32), "obs")
    (action,) = leaves_of(spaces.Discrete(4), "action")
    with pytest.raises(ArgumentError, match=named):
        replay_buffer(obs, action, 100, buffer_class=buffer_class, **switches)


def test_dict_observations_need_a_dict_buffer() -> None:
    obs = leaves_of(spaces.Dict({"a": spaces.Discrete(3)}), "obs")
    (action,) = leaves_of(spaces.Discrete(4), "action")
    with pytest.raises(ArgumentError, match="DictReplayBuffer"):
        replay_buffer(obs, action, 100)
    with pytest.raises(ArgumentError, match="nested"):
        leaves_of(spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(3)})}), "obs")


@pytest.mark.parametrize(("text", "numbers"), [("2.7.0", (2, 7, 0)), ("2.8.0a3", (2, 8, 0)), ("2.9", (2, 9, 0))])
def test_versions_are_compared_as_numbers(text: str, numbers: tuple[int, int, int]) -> None:
    assert parse_version(text) == numbers


def test_the_arithmetic_needs_neither_torch_nor_stable_baselines3() -> None:
    check = (
        "import sys, holdall.tools.plan.spec; sys.exit(bool({'torch', 'stable_baselines3', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
