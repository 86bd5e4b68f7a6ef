"""CleanRL's buffer over a ReplayMemory: the rows, the draws and the tensors of plain arrays, and truncation right."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

import holdall
from holdall.cleanrl import ReplayBuffer, ReplayBufferSamples
from holdall.errors import ArgumentError, SpaceError
from holdall.store.tuning import Tuning

STACK = spaces.Box(0, 255, (4, 12, 12), np.uint8)
VECTOR = spaces.Box(-9, 9, (5,), np.float32)
CART = spaces.Discrete(2)
FORCE = spaces.Box(-1, 1, (3,), np.float32)
TUNING = Tuning(block_bytes=100_000)


class Added(NamedTuple):
    """The arguments of one `add`."""

    obs: Any
    next_obs: Any
    action: Any
    reward: Any
    done: Any
    infos: Any


def make_steps(
    space: spaces.Space[Any], action: spaces.Space[Any], lanes: int, ticks: int, seed: int = 0
) -> Iterator[Added]:
    """Make what CleanRL's scripts add: float64 rewards, terminations, and final observations where they are cut."""
    draw = np.random.default_rng(seed)
    action.seed(seed)

    def observe() -> Any:
        if isinstance(space, spaces.Discrete):
            return draw.integers(0, space.n, lanes)
        given: Any = draw.integers(0, 250, (lanes, *space.shape)) + (0.3 if space is VECTOR else 0)  # type: ignore[misc]
        return given if space is VECTOR else given.astype(space.dtype)  # MuJoCo gives float64 for a space of float32.

    obs = observe()
    for _ in range(ticks):
        following = observe()
        ended = draw.random(lanes) < 0.1
        cut = draw.random(lanes) < 0.1
        final = observe()
        next_obs = following.copy()
        next_obs[cut] = final[cut]
        actions = np.array([action.sample() for _ in range(lanes)])
        infos = [{"TimeLimit.truncated": bool(lane)} if lane else {} for lane in cut]
        yield Added(obs, next_obs, actions, draw.normal(size=lanes), ended, infos)
        obs = following


class PlainSlots:
    """The oracle: every field in an array of slots, and CleanRL's order of draws."""

    def __init__(
        self, slots: int, space: spaces.Space[Any], action: spaces.Space[Any], lanes: int, shares: bool, cuts: bool
    ) -> None:
        self.slots = slots
        self.lanes = lanes
        self.shares = shares
        self.cuts = cuts
        self.ticks = 0
        shape = space.shape or (1,)
        self.obs, self.next_obs = (np.zeros((slots, lanes, *shape), space.dtype) for _ in range(2))
        self.action = np.zeros((slots, lanes, int(np.prod(action.shape or ()))), action.dtype)
        self.reward, self.done = (np.zeros((slots, lanes), np.float32) for _ in range(2))

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        slot = self.ticks % self.slots
        self.obs[slot] = np.reshape(obs, self.obs[slot].shape)
        self.next_obs[slot] = np.reshape(next_obs, self.obs[slot].shape)
        self.action[slot] = np.reshape(action, self.action[slot].shape)
        self.reward[slot] = reward
        cut = [info.get("TimeLimit.truncated", False) for info in infos] if self.cuts else np.zeros(self.lanes)
        self.done[slot] = done * (1 - np.array(cut, np.float32))
        self.ticks += 1

    def sample(self, count: int) -> tuple[NDArray[Any], ...]:
        if self.shares and self.ticks >= self.slots:
            # CleanRL never draws the oldest slot, because its layout has no next_obs there.
            where = (np.random.randint(1, self.slots, size=count) + self.ticks) % self.slots  # noqa: NPY002  CleanRL's generator.
        else:
            where = np.random.randint(0, min(self.ticks, self.slots), size=count)  # noqa: NPY002  CleanRL's generator.
        lane = np.random.randint(0, high=self.lanes, size=count)  # noqa: NPY002  CleanRL's generator.
        one = (self.done[where, lane].reshape(-1, 1), self.reward[where, lane].reshape(-1, 1))
        return self.obs[where, lane], self.action[where, lane], self.next_obs[where, lane], *one


def assert_same_draws(mine: ReplayBuffer, plain: PlainSlots, seed: int) -> None:
    for count in (1, 32, 100):
        np.random.seed(seed)  # noqa: NPY002  CleanRL's scripts seed it.
        expected = plain.sample(count)
        after = np.random.get_state()  # noqa: NPY002  See above.
        np.random.seed(seed)  # noqa: NPY002  See above.
        got = mine.sample(count)
        assert np.array_equal(np.random.get_state()[1], after[1])  # type: ignore[index]  # noqa: NPY002  See above.
        assert type(got) is ReplayBufferSamples
        for name, tensor, array in zip(got._fields, got, expected, strict=True):
            assert tensor.dtype == torch.from_numpy(array).dtype, name
            assert tensor.shape == array.shape, name
            assert tensor.device.type == mine.device.type, name
            assert np.array_equal(tensor.cpu().numpy(), array), name  # JAX scripts take them this way


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "optimize_memory_usage"])
@pytest.mark.parametrize("cuts", [False, True], ids=["terminations", "timeouts"])
@pytest.mark.parametrize(
    ("space", "action"),
    [
        (STACK, CART),
        (VECTOR, FORCE),
        (spaces.Discrete(300), spaces.MultiDiscrete([3, 4])),
        (spaces.MultiBinary(4), spaces.MultiBinary(5)),
        (VECTOR, spaces.Box(-1, 1, (2, 2), np.float32)),
    ],
    ids=["stack", "vector", "discrete", "binary", "matrix"],
)
def test_draws_and_rows_are_those_of_plain_arrays(
    space: Any, action: Any, lanes: int, shares: bool, cuts: bool
) -> None:
    """The rule holds before the buffer is full, when it becomes full, and after every slot was overwritten."""
    slots = 40
    mine = ReplayBuffer(slots * lanes + lanes - 1, space, action, "cpu", lanes, shares, cuts)
    plain = PlainSlots(slots, space, action, lanes, shares, cuts)
    for tick, step in enumerate(make_steps(space, action, lanes, 95)):
        mine.add(*step)
        plain.add(*step)
        if tick in {0, 17, 39, 40, 94}:
            assert_same_draws(mine, plain, seed=tick)
            assert (mine.pos, mine.full, mine.size()) == ((tick + 1) % slots, tick >= 39, min(tick + 1, slots))


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("budget", ["auto", None], ids=["raw", "compressed"])
@pytest.mark.parametrize(("space", "action"), [(STACK, CART), (VECTOR, FORCE)], ids=["stack", "vector"])
def test_batches_on_a_gpu_are_those_of_plain_arrays(space: Any, action: Any, lanes: int, budget: Any) -> None:
    settings: dict[str, Any] = {"budget": budget, "_tuning": Tuning(block_bytes=10_000)}
    mine = ReplayBuffer(200 * lanes, space, action, "cuda", lanes, handle_timeout_termination=False, **settings)
    plain = PlainSlots(200, space, action, lanes, shares=False, cuts=False)
    for tick, step in enumerate(make_steps(space, action, lanes, 450)):
        mine.add(*step)
        plain.add(*step)
        if tick in {0, 150, 449}:
            assert_same_draws(mine, plain, seed=tick)
    mine.memory.store.wait_idle()
    assert_same_draws(mine, plain, seed=7)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "cpu"), ("auto", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_a_missing_gpu_is_replaced_by_the_cpu(device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mine = ReplayBuffer(10, VECTOR, FORCE, device, handle_timeout_termination=False)
    assert mine.device == torch.device(expected)


def test_a_truncated_episode_keeps_its_final_observation_with_optimize_memory_usage() -> None:
    """CleanRL's own layout has one array, where the next episode's first observation overwrites the final one."""
    mine = ReplayBuffer(100, STACK, CART, "cpu", optimize_memory_usage=True, handle_timeout_termination=True)
    theirs = np.zeros((100, 1, *STACK.shape), STACK.dtype)
    steps = list(make_steps(STACK, CART, 1, 60))
    for slot, step in enumerate(steps):
        mine.add(*step._replace(done=step.done | np.array([step.infos != [{}]])))  # This loop has no truncations.
        theirs[slot] = step.obs
        theirs[slot + 1] = step.next_obs
    cut = np.flatnonzero([step.infos != [{}] for step in steps[:-1]])
    assert len(cut) > 2
    batch = mine.memory.gather(np.arange(60))
    final = np.concatenate([step.next_obs for step in steps])
    assert np.array_equal(batch.next_obs, final)
    assert np.array_equal(np.flatnonzero(batch.truncated[:-1]), cut)
    assert not (batch.truncated & batch.terminated).any()
    assert not np.array_equal(theirs[cut + 1, 0], final[cut]), "CleanRL's own layout would be right, too"


def test_a_batch_is_the_callers_own() -> None:
    mine = ReplayBuffer(50, STACK, CART, "cpu")
    steps = list(make_steps(STACK, CART, 1, 120))
    for step in steps[:50]:
        mine.add(*step)
    batch = mine.sample(32)
    before = [tensor.clone() for tensor in batch]
    for step in steps[50:]:
        mine.add(*step)
        mine.sample(32)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(batch, before, strict=True))
    batch.observations.zero_()
    assert mine.sample(32).observations.any()


def test_tensors_begin_where_torchs_own_do() -> None:
    """With another alignment, torch adds floats up in another order, and the weights would differ."""
    mine = ReplayBuffer(50, VECTOR, FORCE, "cpu")
    for step in make_steps(VECTOR, FORCE, 1, 50):
        mine.add(*step)
    for count in (1, 7, 33):
        assert all(tensor.data_ptr() % 64 == 0 for tensor in mine.sample(count))


def test_budget_prefer_and_spill_dir_reach_the_memory_also_after_reset(tmp_path: Path) -> None:
    mine = ReplayBuffer(3000, STACK, CART, "cpu", budget="40MiB", prefer="memory", spill_dir=tmp_path)
    for step in make_steps(STACK, CART, 1, 5):
        mine.add(*step)
    assert mine.report().budget_bytes == 40 * 2**20
    assert any(tmp_path.iterdir())
    mine.reset()
    assert (mine.size(), mine.pos, mine.full, len(mine.memory)) == (0, 0, False, 0)
    assert mine.report().budget_bytes == 40 * 2**20


def test_a_buffer_beyond_its_budget_draws_the_transitions_that_are_held() -> None:
    noise = np.random.default_rng(0)
    image = spaces.Box(0, 255, (70, 70), np.uint8)
    mine = ReplayBuffer(800, image, CART, "cpu", handle_timeout_termination=False, budget="1.5MiB", _tuning=TUNING)
    frames = noise.integers(0, 256, (801, 1, 70, 70), np.uint8)
    for obs, following in itertools.pairwise(frames):
        mine.add(obs, following, np.array([1]), np.array([0.5]), np.array([False]), {})
    mine.memory.store.wait_idle()
    assert 0 < mine.size() == len(mine.memory) < 800
    assert mine.full
    drawn = mine.sample(200).observations.numpy()
    held = {frame.tobytes() for frame in frames[mine.memory.first_id : -1]}
    assert {row.tobytes() for row in drawn} <= held


def test_a_pickled_buffer_and_an_adopted_memory_continue_as_the_original(tmp_path: Path) -> None:
    mine = ReplayBuffer(50, VECTOR, FORCE, "cpu")
    plain = PlainSlots(50, VECTOR, FORCE, 1, shares=False, cuts=True)
    steps = list(make_steps(VECTOR, FORCE, 1, 150))
    for step in steps[:70]:
        mine.add(*step)
        plain.add(*step)
    copied = pickle.loads(pickle.dumps(mine))
    mine.memory.save(tmp_path / "saved").result()
    resumed = ReplayBuffer(50, VECTOR, FORCE, "cpu")
    resumed.adopt(holdall.ReplayMemory.load(tmp_path / "saved"))
    for step in steps[70:]:
        plain.add(*step)
        for each in (copied, resumed):
            each.add(*step)
    assert_same_draws(copied, plain, seed=3)
    assert_same_draws(resumed, plain, seed=4)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (lambda: holdall.ReplayMemory(VECTOR, FORCE, 60), "60 transitions in 1 lanes does not fit a buffer of 50"),
        (lambda: holdall.ReplayMemory(STACK, FORCE, 50), r"\(4, 12, 12\), 'uint8'.* does not fit .*\(5,\), 'float32'"),
    ],
)
def test_a_memory_of_another_size_or_space_is_not_adopted(memory: Any, says: str) -> None:
    mine = ReplayBuffer(50, VECTOR, FORCE, "cpu")
    with pytest.raises(ArgumentError, match=says):
        mine.adopt(memory())
    mine.add(*next(make_steps(VECTOR, FORCE, 1, 1)))
    assert mine.size() == 1


def test_steps_may_be_added_in_one_call() -> None:
    steps = list(make_steps(VECTOR, FORCE, 2, 30))
    one, all_at_once = (ReplayBuffer(60, VECTOR, FORCE, "cpu", n_envs=2) for _ in range(2))
    for step in steps:
        one.add(*step)
    all_at_once.extend(*zip(*steps, strict=True))
    ours = one.memory.gather(np.arange(60))
    theirs = all_at_once.memory.gather(np.arange(60))
    assert np.array_equal(ours.obs, theirs.obs)
    assert np.array_equal(ours.truncated, theirs.truncated)


@pytest.mark.nightly  # The import contract in pyproject.toml checks the same on every change.
def test_the_module_loads_on_first_use_and_without_stable_baselines3() -> None:
    program = (
        "import sys; sys.modules['stable_baselines3'] = None; import holdall; holdall.cleanrl.ReplayBuffer;"
        "print(*[name for name in ('cleanrl_utils', 'jax', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ---------------------------------------------------------------- wrong use


def make_step(**changed: Any) -> Added:
    seen = np.zeros((1, 5), np.float32)
    one = np.array([1])
    right = Added(seen, seen, one, np.array([0.5]), np.array([False]), [{}])
    return right._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"obs": np.zeros((2, 5), np.float32)}, r"obs has shape \(2, 5\), expected \(1, 5\)"),
        ({"next_obs": np.zeros((1, 4), np.float32)}, r"next_obs has shape \(1, 4\), expected \(1, 5\)"),
        ({"action": np.array([0.5])}, r"action has the value 0\.5.*int64\. Pass.*space"),
        ({"action": np.array([1, 0])}, r"action has shape \(2,\), expected \(1,\)"),
        ({"reward": np.array([0.5, 1])}, r"reward has shape \(2,\), expected \(1,\)"),
        ({"done": np.array([0.5])}, r"done has the value 0\.5.*bool.*True or False"),
        ({"done": np.array([True, False])}, r"done has shape \(2,\), expected \(1,\)"),
        ({"infos": {"final_observation": None}}, r"infos is a dict.*handle_timeout_termination=False.*terminations"),
        ({"infos": [{}, {}]}, r"infos has 2 entries.*1 environment"),
        ({"infos": ["final_info"]}, r"infos\[0\] is a str"),
        ({"infos": [{"TimeLimit.truncated": 0.5}]}, r"TimeLimit\.truncated.* 0\.5.*True or False"),
        ({"obs": None}, "obs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_steps_are_refused_and_do_not_change_the_buffer(changed: dict[str, Any], says: str) -> None:
    mine = ReplayBuffer(50, VECTOR, CART, "cpu")
    mine.add(*make_step())
    with pytest.raises(ArgumentError, match=says):
        mine.add(*make_step(**changed))
    assert (mine.pos, mine.full, len(mine.memory)) == (1, False, 1)
    mine.add(*make_step())
    assert mine.size() == 2


def test_infos_of_any_kind_are_ignored_without_handle_timeout_termination() -> None:
    mine = ReplayBuffer(50, VECTOR, CART, "cpu", handle_timeout_termination=False)
    for infos in ({"final_observation": [None]}, None, ()):
        mine.add(*make_step(infos=infos, done=np.array([1.0])))
    assert mine.sample(10).dones.all()


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        ((0, VECTOR, CART), {}, r"buffer_size \(0\)"),
        ((10.5, VECTOR, CART), {}, r"buffer_size \(10\.5\)"),
        ((10, VECTOR, CART), {"n_envs": 0}, r"n_envs \(0\)"),
        ((10, VECTOR, CART), {"device": "nowhere"}, r"device \(nowhere\)"),
        ((10, VECTOR, CART), {"optimize_memory_usage": "yes"}, r"optimize_memory_usage \('yes'\)"),
        ((10, VECTOR, CART), {"handle_timeout_termination": None}, r"handle_timeout_termination \(None\)"),
        ((10, VECTOR, CART), {"budget": "10 bytes"}, "budget"),
    ],
)
def test_wrong_settings_are_refused(arguments: tuple[Any, ...], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        ReplayBuffer(*arguments, **settings)


def test_a_size_may_be_written_as_a_float() -> None:
    assert ReplayBuffer(1e3, VECTOR, CART).buffer_size == 1000


@pytest.mark.parametrize(
    ("observe", "acted", "says"),
    [
        (spaces.Dict({"a": VECTOR}), CART, r"observation_space is a Dict.*holdall\.ReplayMemory"),
        (VECTOR, spaces.Tuple([CART]), r"action_space is a Tuple.*holdall\.ReplayMemory"),
    ],
)
def test_spaces_that_cleanrls_own_buffer_cannot_take_are_refused(observe: Any, acted: Any, says: str) -> None:
    with pytest.raises(SpaceError, match=says):
        ReplayBuffer(10, observe, acted)


def test_sampling_from_an_empty_buffer_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sample\(32\).*before a step was added"):
        ReplayBuffer(10, VECTOR, CART, "cpu").sample(32)


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_wrong_batch_size_is_refused(count: Any) -> None:
    mine = ReplayBuffer(50, VECTOR, CART, "cpu")
    mine.add(*make_step())
    with pytest.raises(ArgumentError, match="batch_size"):
        mine.sample(count)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (1, 0, 2, 3)], ids=["channels last", "environments not first"])
def test_observations_in_another_layout_are_refused(order: tuple[int, ...]) -> None:
    """The same numbers in another order are another observation. CleanRL's own buffer refuses them, too."""
    mine = ReplayBuffer(50, spaces.Box(0, 255, (3, 8, 8), np.uint8), spaces.Box(-1, 1, (2, 3), np.float32), "cpu", 2)
    frames = np.zeros((2, 3, 8, 8), np.uint8)
    rest: Any = np.zeros((2, 6), np.float32), np.zeros(2), np.zeros(2, np.bool_), [{}, {}]
    mine.add(frames, frames, *rest)  # Actions are reshaped.
    with pytest.raises(ArgumentError, match=r"next_obs has shape .*expected \(2, 3, 8, 8\)"):
        mine.add(frames, frames.transpose(order), *rest)
    assert mine.pos == 1
