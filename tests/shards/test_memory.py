"""A memory over shards against a local one, and against the oracle."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from gymnasium import spaces
from numpy.typing import NDArray

import holdall
from holdall import ArgumentError, ClosedError, Prioritized, ShardError, TransitionIdError
from holdall.batch import Batch, Draw
from holdall.cluster.calls import actor_state
from holdall.cluster.ids import shards_of_ids
from holdall.delivery.device import DeviceDelivery
from holdall.delivery.drawn_rows import DrawnRows
from holdall.ray import MemoryHandle, ReplayMemory, Writer
from holdall.sampling import Sampler, new_generator
from holdall.schema import Schema
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits

from .processes import forget_all, wait_until

pytestmark = pytest.mark.usefixtures("cluster")
# Workers cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

OBSERVATION = spaces.Dict(
    image=spaces.Box(0, 255, (4, 16, 24), np.uint8),
    position=spaces.Box(-1, 1, (5,), np.float32),
    prices=spaces.Box(-1, 1, (60,), np.float64),
)
ACTION = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)))
EXTRAS = {"log_prob": spaces.Box(-9, 0, (), np.float32)}
PLANS = [LeafPlan(axis=0, content="table"), LeafPlan(), LeafPlan(axis=0)]


def make_stream(lanes: int = 1, seed: int = 0, ends: float = 0.05) -> Stream:
    mishaps = Mishaps(ends, silent_resets=0.02, skipped_steps=0.02, foreign_next=0.02)
    return Stream(OBSERVATION, ACTION, lanes, plans=PLANS, mishaps=mishaps, extras=EXTRAS, seed=seed)


def make_tick(source: Stream) -> tuple[Any, ...]:
    step = source.tick()
    return step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated, step.extras


@pytest.fixture(scope="module")
def four(cluster: None) -> Iterator[ReplayMemory]:
    with ReplayMemory(OBSERVATION, ACTION, 40_000, shards=4, extras=EXTRAS, seed=3) as memory:
        yield memory


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[ReplayMemory]:
    """A memory of two shards and two lanes."""
    with ReplayMemory(OBSERVATION, ACTION, 6_000, 2, shards=2, extras=EXTRAS, seed=4) as memory:
        yield memory


@pytest.mark.parametrize("prioritized", [False, True])
def test_one_shard_gives_the_batches_of_a_local_memory(prioritized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler() -> Sampler | None:
        return Prioritized(alpha=0.7, beta=0.5) if prioritized else None

    source = make_stream(lanes=2)
    generator = np.random.default_rng(5)
    settings: dict[str, Any] = {"capacity": 300, "num_envs": 2, "extras": EXTRAS, "seed": 11}
    local = holdall.ReplayMemory(OBSERVATION, ACTION, **settings, sampler=sampler())
    with ReplayMemory(OBSERVATION, ACTION, **settings, sampler=sampler(), shards=1) as sharded:
        for count in range(400):
            step = (*make_tick(source), None if count % 7 else np.array([True, count % 2 == 0]))
            local.add(*step)
            sharded.add(*step)
            if count % 40 == 20:
                batch = local.sample(24)
                assert_same_bits(sharded.sample(24), batch)
                if prioritized:
                    priorities = generator.random(24).astype(np.float32)
                    local.update_priorities(batch.ids, priorities)
                    sharded.update_priorities(batch.ids, priorities)
        steps = source.ticks(60)
        whole = (steps.obs, steps.action, steps.reward, steps.next_obs, steps.terminated, steps.truncated, steps.extras)
        local.extend(*whole)
        sharded.extend(*whole)
        assert_same_bits(sharded.sample(64), local.sample(64))
        assert len(sharded) == len(local)
        assert (sharded.first_id, sharded.next_id) == (local.first_id, local.next_id)
        with monkeypatch.context() as patch:
            patch.setattr(sharded._members, "refresh", dict)
            with pytest.raises(ShardError, match="does not answer"):
                sharded.first_id  # noqa: B018
        with sharded.loader(16, prefetch=2) as ahead, local.loader(16, prefetch=2) as expected:
            for _ in range(5):
                assert_same_bits(next(ahead), next(expected))


def test_wrong_arguments_change_nothing(four: ReplayMemory) -> None:
    forget_all(four)
    step = make_tick(make_stream())
    with pytest.raises(ArgumentError, match="reward"):
        four.add(step[0], step[1], np.zeros(3, np.float32), *step[3:])
    assert len(four.gather([])) == 0
    with pytest.raises(ArgumentError, match="0 transitions held"):
        four.sample(1)
    four.add(*step)
    assert len(four) == 1
    with pytest.raises(ArgumentError, match="more than the 1 transitions"):
        four.sample(2)
    with pytest.raises(TransitionIdError):
        four.gather([(1 << 36) + 5, (1 << 48) + (1 << 36) + 5])
    with pytest.raises(TransitionIdError, match="no shard"):
        four.gather([1 << 60])
    with pytest.raises(ArgumentError, match="Prioritized"):
        four.update_priorities([0], [1.0])


def test_four_shards_return_the_transitions_that_were_added(four: ReplayMemory) -> None:
    source = make_stream(ends=0.2)
    before = len(four)
    # With a random seed, one run in hundreds gives a shard fewer than 64 rows.
    four._streams._generator = np.random.default_rng(0)
    added: dict[float, tuple[Any, ...]] = {}
    for _ in range(1_500):
        step = make_tick(source)
        step[-1]["log_prob"][:] = -np.float32(len(added)) - 1  # Identifies the transition.
        added[float(step[-1]["log_prob"][0])] = step
        four.add(*step)
    assert len(four) == before + 1_500
    batch = four.gather(np.concatenate([np.arange(end - 64, end) for end in read_next_ids(four)]))
    assert set(shards_of_ids(batch.ids).tolist()) == {0, 1, 2, 3}
    drawn = four.sample(256)
    assert_same_bits(four.gather(drawn.ids), drawn)
    oracle = OracleMemory(256)
    for name in batch.extras["log_prob"].tolist():
        oracle.add(*added[name])
    expected = oracle.gather(np.arange(256))
    for field in ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras"):
        assert_same_bits(getattr(batch, field), getattr(expected, field))
    assert drawn.weights.tolist() == [1.0] * 256


@pytest.mark.parametrize("prefetch", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_a_loader_returns_the_batches_of_sample(tmp_path: Path, prefetch: int) -> None:
    sampler = Prioritized(alpha=0.7, beta=0.5)
    with ReplayMemory(OBSERVATION, ACTION, 4_000, shards=2, extras=EXTRAS, seed=3, sampler=sampler) as memory:
        source = make_stream()
        writer = memory.writer()
        for _ in range(1_000):
            writer.add(*make_tick(source))
        writer.flush()
        memory.update_priorities(memory.sample(400).ids, np.random.default_rng(1).random(400))
        memory.save(tmp_path).result()
        # The loaded copy has the same rows and ids, and continues to draw from here.
        with ReplayMemory.load(tmp_path) as ahead:
            assert len(memory) == len(ahead) == 1_000
            with ahead.loader(64, prefetch) as loader:
                for _ in range(11):
                    assert_same_bits(next(loader), memory.sample(64))


@ray.remote(num_cpus=0)
def feed(writer: Writer, seed: int, ticks: int) -> int:
    source = make_stream(lanes=2, seed=seed)
    for _ in range(ticks):
        writer.add(*make_tick(source))
    writer.flush()
    return 2 * ticks


def test_transitions_of_writers_in_other_processes_are_held(four: ReplayMemory) -> None:
    writers = [four.writer(num_envs=2, spread=2) for _ in range(2)]
    before = read_next_ids(four)
    assert sum(ray.get([feed.remote(writer, seed, 150) for seed, writer in enumerate(writers)])) == 600
    oracles = []
    for seed in range(2):
        oracle = OracleMemory(300, 2)
        source = make_stream(lanes=2, seed=seed)
        for _ in range(150):
            oracle.add(*make_tick(source))
        oracles.append(oracle.gather(np.arange(300)))
    expected = sorted(row.tobytes() for each in oracles for row in each.obs["image"])
    added = zip(before, read_next_ids(four), strict=True)
    everything = [four.gather(np.arange(start, end)) for start, end in added]
    assert sorted(row.tobytes() for batch in everything for row in batch.obs["image"]) == expected


def read_next_ids(memory: ReplayMemory) -> list[int]:
    """Return the next id of every shard."""
    memory.flush()
    counters_by_shard = memory._members.refresh()
    return [(shard << 48) + counters_by_shard[shard].next_row for shard in sorted(counters_by_shard)]


def test_a_writer_with_waiting_rows_cannot_be_pickled(four: ReplayMemory) -> None:
    writer = four.writer()
    writer.add(*make_tick(make_stream()))
    with pytest.raises(holdall.HoldallError, match="flush"):
        pickle.dumps(writer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards": 0},
        {"capacity": 2},
        {"sampler": type("Own", (holdall.Uniform,), {})()},
    ],
)
def test_wrong_arguments_of_a_memory_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        ReplayMemory(OBSERVATION, ACTION, **wrong)


def test_a_missing_device_is_refused_and_the_name_stays_free() -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"^device \(cuda:77\)"):
            ReplayMemory(OBSERVATION, ACTION, 100, shards=1, name="refused", device="cuda:77")


class RecordedDelivery(DeviceDelivery):
    """A delivery to a device, which is the CPU. It records which thread calls which method."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, "cpu")
        self.calls: list[tuple[str, bool]] = []

    def prepare_drawn(self, draw: Draw, drawn: DrawnRows) -> Any:
        self.calls.append(("prepare", threading.current_thread() is threading.main_thread()))
        return super().prepare_drawn(draw, drawn)

    def receive(self, prepared: Any) -> Batch:
        self.calls.append(("receive", threading.current_thread() is threading.main_thread()))
        return super().receive(prepared)


def test_a_device_receives_a_batch_in_the_thread_that_uses_the_batch(four: ReplayMemory) -> None:
    """The stream of that thread must wait for the copies, also if a loader made the batch in another thread."""
    source = make_stream()
    for _ in range(40):
        four.add(*make_tick(source))
    delivery = RecordedDelivery(four.schema)
    handle = MemoryHandle(four._config, four.sampler, new_generator(0), None, delivery, seeds=True)
    with handle:
        for batch in (handle.sample(8), handle.gather(handle.sample(8).ids)):
            assert_same_bits(batch, four.gather(batch.ids))
        assert set(delivery.calls) == {("prepare", True), ("receive", True)}
        delivery.calls.clear()
        with handle.loader(8, prefetch=2) as loader:
            batch = next(loader)
        assert_same_bits(batch.obs, four.gather(batch.ids).obs)
        assert set(delivery.calls) == {("prepare", False), ("receive", True)}


def test_every_shard_reports_its_machine_its_process_and_its_memory(four: ReplayMemory) -> None:
    statuses = four.shards()
    assert [status.number for status in statuses] == [0, 1, 2, 3]
    assert len({status.pid for status in statuses}) == 4
    assert all(status.answers and status.node and status.uss_bytes > 2**20 for status in statuses)
    assert sum(status.counters.transitions for status in statuses if status.counters is not None) == len(four)


def test_closing_a_memory_ends_its_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an interrupt ends the wait for the shards."""
    memory = ReplayMemory(OBSERVATION, ACTION, 100, shards=1, extras=EXTRAS, patience_s=60.0)
    actors = [memory._fleet.roster, memory._members.handle(0)]
    memory._has_saved = True
    with monkeypatch.context() as patch:
        patch.setattr(ray, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            memory.close()
    memory.close()
    with pytest.raises(ClosedError):
        memory.add(*make_tick(make_stream()))
    wait_until(lambda: all(actor_state(actor) == "gone" for actor in actors))


def test_rewriting_extras_of_shards_is_refused(four: ReplayMemory) -> None:
    with pytest.raises(ArgumentError, match=r"^update of \['log_prob'\]: .*Use a holdall.ReplayMemory"):
        four.update([0], log_prob=np.zeros(1, np.float32))


def test_the_report_adds_up_all_shards(four: ReplayMemory) -> None:
    source = make_stream(ends=0.2)
    for _ in range(600):
        four.add(*make_tick(source))
    report = four.report()
    assert report.transitions == len(four)
    assert {field.name for field in report.fields} >= {"obs.image", "obs.position", "reward", "extras.log_prob"}
    assert report.ratio > 2


@pytest.mark.parametrize("shards", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_loaded_memory_continues_where_it_was_saved(shards: int, tmp_path: Path) -> None:
    """With its sampler, the settings of the sampler and the priorities."""
    source = make_stream(ends=0.2)
    sampler = Prioritized(0.7, 0.3)
    settings: dict[str, Any] = {"extras": EXTRAS, "seed": 4}
    with ReplayMemory(OBSERVATION, ACTION, 900, shards=shards, sampler=sampler, **settings) as memory:
        for count in range(1_300):
            memory.add(*make_tick(source))
            if count % 200 == 150:
                batch = memory.sample(32)
                memory.update_priorities(batch.ids, np.linspace(0, 2, 32))
        first = memory.save(tmp_path).result()
        for _ in range(40):
            memory.add(*make_tick(source))
        second = memory.save(tmp_path).result()
        assert (second.number, second.transitions) == (first.number + 1, len(memory))
        assert first.bytes_written == first.bytes_total
        assert second.bytes_written < first.bytes_written / 2
        with ReplayMemory.load(tmp_path) as again:
            assert len(again) == len(memory)
            assert isinstance(again.sampler, Prioritized)
            assert (again.sampler.alpha, again.sampler.beta) == (0.7, 0.3)
            for _ in range(3):
                assert_same_bits(again.sample(64), memory.sample(64))
            for step in (make_tick(source) for _ in range(200)):
                again.add(*step)
            assert len(again) <= 900
            drawn = again.sample(128)
            assert_same_bits(again.gather(drawn.ids).obs, drawn.obs)
    with pytest.raises(holdall.CheckpointError, match="No complete checkpoint"):
        ReplayMemory.load(tmp_path / "elsewhere")


def make_marked_ticks(source: Stream, count: int) -> list[tuple[Any, ...]]:
    """Return ticks with a different `log_prob` in every transition."""
    ticks = [make_tick(source) for _ in range(count)]
    for tick, step in enumerate(ticks):
        step[-1]["log_prob"][:] = -np.arange(tick * 2, tick * 2 + 2, dtype=np.float32) - 1
    return ticks


def sort_by_mark(batch: Any) -> list[tuple[bytes, ...]]:
    """Return every transition as bytes, in the order of `log_prob`. Truncation depends on where lanes are cut."""
    order = np.argsort(-batch.extras["log_prob"])
    fields = (*batch.obs.values(), *batch.next_obs.values(), *batch.action, batch.reward, batch.terminated)
    return [tuple(field[row].tobytes() for field in (*fields, batch.extras["log_prob"])) for row in order.tolist()]


def test_a_checkpoint_of_shards_is_loaded_into_a_local_memory(pair: ReplayMemory, tmp_path: Path) -> None:
    forget_all(pair)
    ticks = make_marked_ticks(make_stream(lanes=2, ends=0.1), 700)
    for step in ticks:
        pair.add(*step)
    pair.save(tmp_path).result()
    ids = np.concatenate([np.arange(end - counters, end) for end, counters in read_ends(pair)])
    expected = pair.gather(ids)
    with holdall.ReplayMemory.load(tmp_path) as local:
        assert len(local) == 1_400
        found = np.arange(local.first_id, local.next_id)
        found = found[local.are_valid(found)]
        assert sort_by_mark(local.gather(found)) == sort_by_mark(expected)
        local.add(*ticks[0])
        local.save(tmp_path / "again").result()
    with holdall.ReplayMemory.load(tmp_path / "again") as again:
        assert len(again) == 1_402


def test_a_local_checkpoint_is_loaded_into_shards(tmp_path: Path) -> None:
    ticks = make_marked_ticks(make_stream(lanes=2, ends=0.1), 700)
    with holdall.ReplayMemory(OBSERVATION, ACTION, 1_200, 2, extras=EXTRAS) as local:
        for count, step in enumerate(ticks):
            local.add(*(*step, None if count % 35 else np.array([True, count % 2 == 0])))
        local.save(tmp_path).result()
        ids = np.arange(local.first_id, local.next_id)
        expected = local.gather(ids[local.are_valid(ids)])
    with ReplayMemory.load(tmp_path, shards=2) as memory:
        assert (memory.num_envs, memory.num_shards, len(memory)) == (2, 2, len(expected))
        ids = np.concatenate([np.arange(end - counters, end) for end, counters in read_ends(memory)])
        found = memory.gather(keep_transitions(memory, ids))
        assert sort_by_mark(found) == sort_by_mark(expected)
        assert sorted(zip(found.extras["log_prob"], found.truncated, strict=True)) == sorted(
            zip(expected.extras["log_prob"], expected.truncated, strict=True)
        )
        memory.add(*ticks[0])
        assert len(memory) == len(expected) + 2


def read_ends(memory: ReplayMemory) -> list[tuple[int, int]]:
    """Return the next id of every shard, and the number of its rows."""
    found = memory._members.refresh()
    return [((shard << 48) + each.next_row, each.next_row - each.first_row) for shard, each in sorted(found.items())]


def keep_transitions(memory: ReplayMemory, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the `ids` that are transitions. Bisection needs few calls."""
    try:
        memory.gather(ids)
    except TransitionIdError:
        if len(ids) == 1:
            return ids[:0]
        return np.concatenate([keep_transitions(memory, half) for half in np.array_split(ids, 2)])
    return ids


def test_overlapping_saves_are_all_complete(pair: ReplayMemory, tmp_path: Path) -> None:
    forget_all(pair)
    source = make_stream(lanes=2)
    for _ in range(300):
        pair.add(*make_tick(source))
    handles = []
    for _ in range(4):
        pair.add(*make_tick(source))
        handles.append(pair.save(tmp_path, keep=1))
    assert [handle.result().number for handle in handles] == [1, 2, 3, 4]
    with ReplayMemory.load(tmp_path) as again:
        assert len(again) == 608
        assert_same_bits(again.sample(64), pair.sample(64))
    with holdall.ReplayMemory.load(tmp_path) as local:
        assert len(local) == 608


@pytest.mark.parametrize("kind", [holdall.Uniform, holdall.Prioritized])
def test_a_sampler_that_draws_by_a_users_own_is_refused(kind: Any) -> None:
    """Its draws would get the weights of holdall's own sampler."""
    by = type("Own", (kind,), {})()
    with pytest.raises(ArgumentError, match=r"NStep.*draws by Own.*by=Uniform\(\) or by=Prioritized\(\)"):
        ReplayMemory(OBSERVATION, ACTION, sampler=holdall.NStep(3, 0.9, by=by))
