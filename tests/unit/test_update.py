"""`update` rewrites the named extras of its ids in one moment, also in compressed, spilled and saved transitions."""

from __future__ import annotations

import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, assert_same_bits

LANES = 2
STATE = spaces.Box(-np.inf, np.inf, (4,), np.float32)
LATENT = spaces.Dict({"h": STATE, "z": spaces.Tuple((spaces.Discrete(9), spaces.MultiBinary(3)))})
EXTRAS = {"hidden": STATE, "latent": LATENT, "value": spaces.Box(-9, 9, (), np.float64)}


class Both:
    """A memory, and an oracle with the same steps."""

    def __init__(self, ticks: int = 30, capacity_ticks: int = 40, **settings: Any) -> None:
        shape = (settings.pop("obs_bytes", 3),)
        self.space = spaces.Box(0, 255, shape, np.uint8)
        self.generator = np.random.default_rng(0)
        self.memory = holdall.ReplayMemory(
            self.space,
            spaces.Discrete(3),
            capacity_ticks * LANES,
            LANES,
            seed=0,
            extras=settings.pop("extras", EXTRAS),
            **settings,
        )
        self.oracle = OracleMemory(capacity_ticks * LANES, LANES)
        self.obs = self.generator.integers(0, 255, (LANES, *shape), np.uint8)
        self.add(ticks)

    def add(self, ticks: int, **more: Any) -> None:
        for _ in range(ticks):
            following = self.generator.integers(0, 255, self.obs.shape, np.uint8)
            ended = self.generator.random(LANES) < 0.2
            given = {
                "obs": self.obs,
                "action": np.zeros(LANES, np.int64),
                "reward": np.zeros(LANES, np.float32),
                "next_obs": following,
                "terminated": ended,
                "truncated": ~ended,
                "extras": self.rows(LANES),
                **more,
            }
            self.memory.add(**given)
            self.oracle.add(**given)
            self.obs = following

    def rows(self, count: int) -> dict[str, Any]:
        """Return rows of all extras."""
        draw = self.generator
        return {
            "hidden": draw.standard_normal((count, 4)).astype(np.float32),
            "latent": {
                "h": draw.standard_normal((count, 4)).astype(np.float32),
                "z": (draw.integers(0, 9, count), draw.integers(0, 2, (count, 3)).astype(np.int8)),
            },
            "value": draw.standard_normal(count),
        }

    def update(self, ids: Any, **rows: Any) -> None:
        self.oracle.update(ids, **rows)
        self.memory.update(ids, **rows)

    def check(self, memory: holdall.ReplayMemory | None = None) -> None:
        ids = self.oracle.ids
        assert_same_bits((memory or self.memory).gather(ids), self.oracle.gather(ids))


@pytest.fixture
def both() -> Both:
    return Both()


@pytest.mark.parametrize("names", [["hidden"], ["value"], ["latent"], ["hidden", "value", "latent"]], ids="+".join)
def test_update_changes_the_named_extras_and_nothing_else(names: list[str], both: Both) -> None:
    ids = np.array([7, 0, 59, 33])
    rows = both.rows(4)
    both.update(ids, **{name: rows[name] for name in names})
    both.check()
    both.add(25)  # The first ticks are evicted.
    both.check()
    both.update(both.oracle.ids[-3:], **both.rows(3))
    both.check()


def test_an_id_that_occurs_twice_gets_its_last_row(both: Both) -> None:
    ids = np.array([5, 9, 5, 5, 9, 11])
    both.memory.update(ids, value=np.arange(6.0))
    assert both.memory.gather([5, 9, 11]).extras["value"].tolist() == [3.0, 4.0, 5.0]


def test_an_update_of_no_ids_changes_nothing(both: Both) -> None:
    both.memory.update([], **both.rows(0))
    both.check()


def test_tensors_with_gradients_are_accepted(both: Both) -> None:
    rows = torch.ones((2, 4), requires_grad=True) * 3
    both.memory.update(torch.tensor([4, 6]), hidden=rows)
    assert both.memory.gather([4, 6]).extras["hidden"].tolist() == [[3.0] * 4] * 2


def test_an_extra_may_have_any_name() -> None:
    extras = {"ids": STATE, "self": STATE, "columns": STATE}
    memory = holdall.ReplayMemory(STATE, spaces.Discrete(2), 8, extras=extras)
    row = np.zeros((1, 4), np.float32)
    flag = np.zeros(1, np.bool_)
    memory.add(row, np.zeros(1, np.int64), np.zeros(1), row, flag, flag, extras=dict.fromkeys(extras, row))
    memory.update([0], ids=row + 1, self=row + 2, columns=row + 3)
    assert {name: rows[0, 0] for name, rows in memory.gather([0]).extras.items()} == {"ids": 1, "self": 2, "columns": 3}


ROW = np.zeros((1, 4), np.float32)
REFUSED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "evicted": (r"ids holds 3, .*first_id \(20\)", [30, 3], {"value": np.zeros(2)}),
    "not added yet": (r"ids holds 100, .*next_id \(100\)", [100], {"value": np.zeros(1)}),
    "invalid entry": ("ids holds 97, .*valid=False", [97], {"value": np.zeros(1)}),
    "sequences": (r"ids has shape \(2, 2\).*ids\[mask\]", [[20, 21], [22, 23]], {"value": np.zeros((2, 2))}),
    "unknown": (
        r"state is not an extra .*\['hidden', 'latent', 'value'\].*extras={'state': Box",
        [30],
        {"state": np.zeros(1)},
    ),
    "reward": ("reward is not an extra of this memory", [30], {"reward": np.zeros(1)}),
    "nothing": ("update was given no rows", [30], {}),
    "dtype": ("value has dtype float32, but the space has dtype float64", [30], {"hidden": ROW, "value": ROW[:, 0]}),
    "shape": (r"hidden has shape \(4,\), expected \(1, 4\): one row per id then", [30], {"hidden": ROW[0]}),
    "too few": (r"hidden has shape \(1, 4\), expected \(2, 4\)", [30, 31], {"hidden": ROW}),
    "nest": ("latent has the keys", [30], {"latent": {"h": ROW}}),
    "deep": (
        r"latent\['z\.1'\] has dtype int64",
        [30],
        {"latent": {"h": ROW, "z": (np.zeros(1, np.int64), np.full((1, 3), -(2**40), np.int64))}},
    ),
    "masked": ("value is a masked array", [30], {"value": np.ma.array([1.0], mask=[True])}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_update_is_refused_and_nothing_is_written(case: str) -> None:
    says, ids, rows = REFUSED[case]
    both = Both(ticks=48)
    both.add(2, valid=np.array([True, False]))
    kind = holdall.TransitionIdError if says.startswith("ids holds") else holdall.ArgumentError
    with pytest.raises(kind, match=f"^{says}"):
        both.memory.update(ids, **rows)
    both.check()


def test_a_memory_without_extras_says_how_to_declare_one() -> None:
    with (
        holdall.ReplayMemory(STATE, spaces.Discrete(2), 8) as memory,
        pytest.raises(
            holdall.ArgumentError, match=r"^hidden is not an extra of this memory, which has \[\]\. .*extras="
        ),
    ):
        memory.update([], hidden=np.zeros((0, 4), np.float32))


def test_update_of_a_closed_memory_is_refused(both: Both) -> None:
    both.memory.close()
    with pytest.raises(holdall.ClosedError, match=r"^The memory was closed\. Make a new ReplayMemory\.$"):
        both.memory.update([2], value=np.zeros(1))


def test_updates_reach_compressed_and_spilled_transitions(tmp_path: Path) -> None:
    """Observations are compressed and on disk. Extras are in memory."""
    small = Tuning(block_bytes=60_000)
    both = Both(ticks=120, capacity_ticks=200, obs_bytes=6000, budget=None, spill_dir=tmp_path, _tuning=small)
    both.memory.store.wait_idle()
    assert both.memory.disk_bytes
    both.update(np.arange(0, 240, 3), **both.rows(80))
    both.check()
    both.memory.close()


# ---------------------------------------------------------------- snapshots and checkpoints


def test_a_checkpoint_has_the_state_at_the_call_of_save(tmp_path: Path) -> None:
    """All extras are rewritten before the first byte is written to the file."""
    gate = threading.Event()

    def wait(*_progress: Any) -> None:
        gate.wait(60)

    both = Both(ticks=150, capacity_ticks=200)
    handle = both.memory.save(tmp_path / "run", progress=wait)
    then = pickle.loads(pickle.dumps(both.oracle))
    for _ in range(3):
        both.update(both.oracle.ids[::3], **both.rows(100))
    both.add(70)
    gate.set()
    handle.result(60)
    both.check()
    with holdall.ReplayMemory.load(tmp_path / "run") as loaded:
        assert_same_bits(loaded.gather(then.ids), then.gather(then.ids))
    both.memory.save(tmp_path / "run").result(60)
    with holdall.ReplayMemory.load(tmp_path / "run") as loaded:
        both.check(loaded)
    both.memory.close()


def test_a_loaded_memory_saves_extras_that_were_rewritten_after_loading(tmp_path: Path) -> None:
    """It saves to the place that it was loaded from, where everything else is saved already."""
    both = Both(ticks=250, capacity_ticks=300)
    both.memory.save(tmp_path / "run").result(60)
    both.memory.close()
    for _ in range(2):
        both.memory = holdall.ReplayMemory.load(tmp_path / "run")
        both.check()
        both.update([0, 7, 200], **both.rows(3))
        both.memory.save(tmp_path / "run").result(60)
        both.memory.close()
    both.memory = holdall.ReplayMemory.load(tmp_path / "run")
    both.check()
    both.memory.close()


def test_a_snapshot_never_changes() -> None:
    both = Both(ticks=300, capacity_ticks=300)
    state = both.memory.store.snapshot()
    then = both.memory.gather(both.oracle.ids)
    for _ in range(3):
        both.update(both.oracle.ids[::7], **both.rows(len(both.oracle.ids[::7])))
    both.memory.set_flags(both.oracle.ids[:9], np.ones(9, np.bool_), np.zeros(9, np.bool_))
    copy = Both(ticks=0, capacity_ticks=300)
    copy.memory.store.restore(state)
    assert_same_bits(copy.memory.gather(then.ids), then)


def test_a_pickle_has_the_state_at_the_call_of_dump() -> None:
    extras = {"hidden": spaces.Box(-9, 9, (100_000,), np.float32)}
    memory = holdall.ReplayMemory(STATE, spaces.Discrete(2), 2, extras=extras)
    row = np.zeros((1, 4), np.float32)
    flag = np.zeros(1, np.bool_)
    state = np.zeros((1, 100_000), np.float32)
    memory.add(row, np.zeros(1, np.int64), np.zeros(1), row, flag, flag, extras={"hidden": state})

    class UpdatingFile(io.BytesIO):
        def write(self, data: Any) -> int:
            if memoryview(data).nbytes > 100_000:
                memory.update([0], hidden=state + 1)
            return super().write(data)

    file = UpdatingFile()
    pickle.dump(memory, file, protocol=5)
    assert memory.gather([0]).extras["hidden"].min() == 1
    assert pickle.loads(file.getvalue()).gather([0]).extras["hidden"].max() == 0


# ---------------------------------------------------------------- batches


def test_batches_have_the_extras_at_the_moment_of_their_draw(both: Both) -> None:
    """The rule holds for batches that were returned, and for batches that a loader has drawn ahead."""
    ids = both.oracle.ids
    kept = both.memory.gather(ids)
    old = kept.extras["value"].copy()
    with both.memory.loader(50, prefetch=2) as batches:
        first = next(batches)
        both.memory.update(ids, value=np.arange(60.0))
        assert kept.extras["value"].tobytes() == old.tobytes()
        for batch in (first, next(batches), next(batches)):
            assert batch.extras["value"].tobytes() == old[batch.ids].tobytes()
        assert next(batches).extras["value"].max() > 30


@pytest.mark.parametrize("by", [holdall.Uniform, holdall.Prioritized])
def test_a_sequence_begins_with_the_stored_state_of_its_first_step(by: Any) -> None:
    """If the burn-in begins before the episode, this is the first step of the episode."""
    both = Both(ticks=60, capacity_ticks=80, sampler=holdall.Sequence(4, burn_in=3, by=by()))
    for _ in range(2):
        batch = both.memory.sample(64)
        assert not batch.mask[:, 0].all()
        first = batch.ids[np.arange(64), batch.mask.argmax(axis=1)]
        assert_same_bits(batch.extras["hidden"][:, 0], both.oracle.gather(first).extras["hidden"])
        real = batch.mask
        both.update(batch.ids[real], hidden=both.rows(int(real.sum()))["hidden"])


def test_readers_see_all_columns_of_an_update_together() -> None:
    """No reader sees a row with one old and one new column, or a batch with rows of two updates."""
    extras = {"a": STATE, "b": STATE}
    memory = holdall.ReplayMemory(STATE, spaces.Discrete(2), 64, extras=extras, seed=0)
    row = np.zeros((1, 4), np.float32)
    flag = np.zeros(1, np.bool_)
    for _ in range(64):
        memory.add(row, np.zeros(1, np.int64), np.zeros(1), row, flag, flag, extras={"a": row, "b": row})
    done = threading.Event()
    wrong = []

    def look() -> None:
        while not done.is_set():
            seen = memory.sample(64).extras
            if len(np.unique(np.concatenate([seen["a"], seen["b"]]))) != 1:
                wrong.append(seen)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(300):
        rows = np.full((64, 4), turn, np.float32)
        memory.update(np.arange(64), a=rows, b=rows)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    memory.close()
