"""A dataset's rows are those of a plain list, in every process, and windows end where episodes end."""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_workers import collate_nothing, read_and_keep
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import holdall
from holdall.dataset import METADATA
from holdall.dataset_batches import Batches
from holdall.dataset_rows import BlockPool
from holdall.errors import ArgumentError, CheckpointError, ClosedError, TransitionIdError
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, Stream, assert_same_bits
from holdall.testing.oracle import n_step_batch
from holdall.testing.streams import LeafPlan, Mishaps

SMALL = Tuning(block_bytes=4_000, packed_segment_bytes=2_000, min_packed_rows=8)
SPACE = spaces.Dict({"image": spaces.Box(0, 255, (4, 16, 16), np.uint8), "state": spaces.Box(-1, 1, (3,), np.float32)})
EXTRAS = {"timestamp": spaces.Box(0, 1e6, (), np.float32), "task": spaces.Discrete(9)}


class Recording:
    """A checkpoint, and an oracle with the same steps."""

    def __init__(self, folder: Path, seed: int, lanes: int, ticks: int, capacity: int, invalid: float) -> None:
        generator = np.random.default_rng(seed)
        stream = Stream(
            SPACE,
            spaces.Discrete(5),
            lanes,
            plans=[LeafPlan(axis=0, padding="first"), LeafPlan()],
            mishaps=Mishaps(ends=0.1, silent_resets=0.02, foreign_next=0.05),
            extras={"task": EXTRAS["task"]},
            seed=seed,
        )
        self.url = folder
        self.oracle = OracleMemory(capacity, lanes)
        with holdall.ReplayMemory(
            SPACE, spaces.Discrete(5), capacity, lanes, extras=stream.extras, budget=None, _tuning=SMALL
        ) as memory:
            for _ in range(ticks):
                step = stream.tick().arguments()
                step["valid"] = generator.random(lanes) >= invalid
                if not step["valid"].any():
                    step["valid"][:] = True
                memory.add(**step)
                self.oracle.add(**step)
            memory.save(folder).result()

    def row(self, number: int, key: str) -> Any:
        """Return one key of one transition, as a plain list has it."""
        batch = self.oracle.gather([number])
        values: dict[str, Any] = {
            "observation.image": batch.obs["image"],
            "observation.state": batch.obs["state"],
            "next_observation.image": batch.next_obs["image"],
            "next_observation.state": batch.next_obs["state"],
            "action": batch.action,
            "reward": batch.reward,
            "terminated": batch.terminated,
            "truncated": batch.truncated,
            "task": batch.extras["task"],
        }
        return values[key][0]

    def step(self, number: int, offset: int) -> tuple[int, bool]:
        """Return the transition `offset` steps away, or the nearest one of the episode and True."""
        direction = 1 if offset > 0 else -1
        for _ in range(abs(offset)):
            following = number + direction * self.oracle.num_envs
            if not self.oracle.first_id <= following < self.oracle.next_id:
                return number, True
            before = number if direction > 0 else following
            if not self.oracle.are_valid(np.array([following]))[0] or self._ends(before):
                return number, True
            number = following
        return number, False

    def _ends(self, number: int) -> bool:
        tick, lane = self.oracle.place(number)
        return bool(tick.terminated[lane] or tick.truncated[lane])


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(tmp_path_factory.mktemp("recording"), seed=1, lanes=1, ticks=120, capacity=200, invalid=0.0)


@given(
    seed=st.integers(0, 2**31),
    lanes=st.sampled_from([1, 3]),
    ticks=st.integers(1, 90),
    capacity=st.sampled_from([60, 300]),
    invalid=st.sampled_from([0.0, 0.2]),
    offsets=st.lists(st.integers(-6, 6), min_size=1, max_size=5),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_window_is_that_of_a_plain_list(
    seed: int,
    lanes: int,
    ticks: int,
    capacity: int,
    invalid: float,
    offsets: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = Recording(tmp_path_factory.mktemp("run"), seed, lanes, ticks, capacity, invalid)
    deltas = {"observation.image": [k / 10 for k in offsets], "action": [k / 10 for k in reversed(offsets)]}
    with holdall.Dataset.open(made.url, delta_timestamps=deltas, fps=10) as dataset:
        assert len(dataset) == len(made.oracle)
        rows = dataset[np.arange(len(dataset))]
        np.testing.assert_array_equal(rows["id"], made.oracle.ids)
        for index, number in enumerate(made.oracle.ids.tolist()):
            for key, order in (("observation.image", offsets), ("action", offsets[::-1])):
                steps = [made.step(number, offset) for offset in order]
                assert_same_bits(rows[key][index], np.stack([made.row(each, key) for each, _ in steps]))
                assert rows[f"{key}_is_pad"][index].tolist() == [is_pad for _, is_pad in steps]
            for key in ("observation.state", "reward", "terminated", "truncated", "task"):
                assert_same_bits(rows[key][index], made.row(number, key))


def test_a_step_has_every_key(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url) as dataset:
        for number in (0, 7, len(dataset) - 1, -1):
            row = dataset[number]
            assert list(row) == [*dataset.features, "id"]
            for key, (shape, dtype) in dataset.features.items():
                assert (row[key].shape, row[key].dtype) == (shape, dtype)
                assert_same_bits(row[key], recording.row(int(row["id"]), key))
        assert_same_bits(dataset.gather([5, 3, 5]), recording.oracle.gather([5, 3, 5]))
        assert [int(row["id"]) for row in dataset] == recording.oracle.ids.tolist()


def test_batches_of_indices_are_read_at_once(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url, keys=["reward", "observation.state"]) as dataset:
        rows = dataset[[4, 4, 2]]
        assert list(rows) == ["reward", "observation.state", "id"]
        for row, single in zip(dataset.__getitems__([4, 4, 2]), (4, 4, 2), strict=True):
            assert_same_bits(row, dataset[single])
        assert_same_bits(rows["reward"], recording.oracle.gather([4, 4, 2]).reward)
        assert_same_bits(dataset[10:13], dataset[[10, 11, 12]])


def test_n_step_returns_are_those_of_the_sampler(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url, sampler=holdall.NStep(3, 0.9)) as dataset:
        ids = np.arange(len(dataset))
        with np.errstate(all="ignore"):  # The stream's rewards have NaNs and huge numbers.
            expected = n_step_batch(recording.oracle, ids, 3, 0.9)
        rows = dataset[ids]
        assert_same_bits(rows["reward"], expected.reward)
        assert_same_bits(rows["discount"], expected.discount)
        assert_same_bits(rows["next_observation.image"], expected.next_obs["image"])
        assert_same_bits(rows["observation.image"], expected.obs["image"])
        assert_same_bits(rows["terminated"], expected.terminated)


def test_sequences_repeat_the_last_step_of_an_episode(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url, sampler=holdall.Sequence(5, burn_in=2)) as dataset:
        rows = dataset[np.arange(len(dataset))]
        for number in recording.oracle.ids.tolist():
            steps = [recording.step(number, offset) for offset in range(-2, 5)]
            assert rows["mask"][number].tolist() == [not is_pad for _, is_pad in steps]
            expected = np.stack([recording.row(each, "observation.state") for each, _ in steps])
            assert_same_bits(rows["observation.state"][number], expected)


def test_a_pass_has_every_index_once() -> None:
    batches = Batches(10, 5, seed=3)
    passes = [np.concatenate(list(batches)) for _ in range(3)]
    assert all(sorted(each.tolist()) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    again = Batches(10, 5, seed=3)
    again.epoch = 2
    np.testing.assert_array_equal(np.concatenate(list(again)), passes[2])


def test_weights_decide_how_often_an_index_is_drawn(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url) as dataset:
        weights = np.zeros(len(dataset))
        weights[[3, 50]] = 1.0, 3.0
        batches = dataset.batches(1000, weights=weights, seed=0, num_batches=4)
        assert len(batches) == 4
        drawn = np.concatenate(list(batches))
        assert set(drawn.tolist()) == {3, 50}
        assert 0.7 < np.mean(drawn == 50) < 0.8
        for wrong in (weights[:-1], -weights, 0 * weights, weights + np.inf):
            with pytest.raises(ArgumentError, match="weights"):
                dataset.batches(10, weights=wrong)


def test_a_loader_repeats_passes_in_the_order_of_its_seed(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url, keys=["reward"]) as dataset:
        loader = dataset.loader(50, seed=4)
        found = [next(loader) for _ in range(5)]
        batches = dataset.batches(50, seed=4)
        expected = [dataset[indices] for _ in range(3) for indices in batches]
        for rows, same in zip(found, expected, strict=False):
            assert_same_bits(rows, same)


# ---------------------------------------------------------------- processes


def read_in_child(dataset: holdall.Dataset, indices: NDArray[np.int64], answers: Any) -> None:
    answers.put((dataset[indices], dataset.sample(4)["id"].tolist(), os.getpid()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_children_read_the_same_rows(recording: Recording) -> None:
    context = multiprocessing.get_context("fork")
    deltas = {"observation.image": [-0.1, 0.0, 0.2]}
    with holdall.Dataset.open(recording.url, delta_timestamps=deltas, fps=10, seed=5) as dataset:
        indices = np.arange(len(dataset))
        answers = context.Queue()
        children = [context.Process(target=read_in_child, args=(dataset, indices, answers)) for _ in range(2)]
        for child in children:
            child.start()
        found = [answers.get(timeout=60) for _ in children]
        for child in children:
            child.join()
        assert len({process for _, _, process in found} | {os.getpid()}) == 3
        assert found[0][1] != found[1][1]  # One seed, but other steps in each worker.
        expected = dataset[indices]
        for rows, _, _ in found:
            assert_same_bits(rows, expected)


def test_spawned_children_read_the_same_rows(recording: Recording) -> None:
    """Spawned children get a pickle of the dataset."""
    indices = list(range(0, 120, 7))
    with (
        holdall.Dataset.open(recording.url, delta_timestamps={"action": [0.0, 0.1]}, fps=10) as dataset,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        assert_same_bits(pool.submit(operator.itemgetter(indices), dataset).result(60), dataset[indices])


def test_a_pickle_has_settings_and_no_data(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url, keys=["action"]) as dataset:
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 1_000
        with pickle.loads(pickled) as again:
            assert_same_bits(again[[0, 9]], dataset[[0, 9]])


def test_a_loader_of_torch_reads_with_workers(recording: Recording) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    deltas = {"observation.image": [-0.1, 0.0], "action": [0.0, 0.1]}
    with holdall.Dataset.open(recording.url, delta_timestamps=deltas, fps=10) as dataset:
        data: Any = dataset  # holdall does not import torch, so it cannot derive from torch's class.
        batches = dataset.batches(16, seed=0)
        plain = list(DataLoader(data, batch_size=40, num_workers=2, multiprocessing_context="fork"))
        assert [len(batch["id"]) for batch in plain] == [40, 40, 40]
        by_list = list(DataLoader(data, batch_sampler=batches, num_workers=2, multiprocessing_context="fork"))
        at_once = list(DataLoader(data, sampler=dataset.batches(16, seed=0), batch_size=None))
        assert len(by_list) == len(at_once) == 7
        for batch, other in zip(by_list, at_once, strict=True):
            expected = dataset[batch["id"].numpy()]
            assert_same_bits({key: batch[key] for key in expected}, expected)
            assert_same_bits({key: other[key] for key in expected}, expected)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("collate", [None, collate_nothing], ids=["tensors", "arrays"])
def test_batches_of_workers_stay_as_they_were_received(recording: Recording, method: str, collate: Any) -> None:
    """Workers read later batches into the same shared memory, while earlier batches are still in use."""
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    deltas = {"observation.image": [-0.1, 0.0], "action": [0.0, 0.1]}
    with holdall.Dataset.open(recording.url, delta_timestamps=deltas, fps=10) as dataset:
        data: Any = dataset
        batches = dataset.batches(32, seed=0, num_batches=24)
        loader: Any = DataLoader(
            data, batch_size=None, sampler=batches, num_workers=2, multiprocessing_context=method, collate_fn=collate
        )
        kept = list(loader)
        assert {type(value).__module__ for value in kept[0].values()} == {"torch" if collate is None else "numpy"}
        assert len(kept) == 24
        for batch in kept:
            found = {key: np.asarray(value) for key, value in batch.items()}
            assert_same_bits(found, dataset[found["id"]])


def test_memory_that_a_worker_still_uses_is_not_written_again(recording: Recording) -> None:
    pytest.importorskip("torch")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with holdall.Dataset.open(recording.url, keys=["observation.image", "reward"]) as dataset:
        child = context.Process(target=read_and_keep, args=(dataset, answers))
        child.start()
        for first in range(0, 60, 3):
            for _ in range(2):
                assert_same_bits(answers.get(timeout=60), dataset[np.arange(first, first + 40)])
        for number, (rows, copied) in enumerate(answers.get(timeout=60)):
            expected = dataset[np.arange(3 * number, 3 * number + 40)]
            assert_same_bits(copied, expected)
            if len(rows) == 1:
                expected = {"observation.image": expected["observation.image"][3:9]}
            assert_same_bits(rows, expected)
        child.join()
        assert child.exitcode == 0


def test_a_block_is_used_again_only_when_nobody_uses_it() -> None:
    pool = BlockPool()
    assert pool.lease(100) is None
    first = pool.lease(100_000)
    if first is None:
        pytest.skip("this system has no anonymous files")
    part = np.ndarray((10,), np.uint8, first)[2:4]
    block = first.block
    del first
    second = pool.lease(50_000)
    assert second is not None
    assert second.block is not block  # `part` still shows the memory.
    second.block.send()
    other = second.block
    del part, second
    third = pool.lease(80_000)
    assert third is not None
    assert third.block is block
    fourth = pool.lease(40_000)
    assert fourth is not None
    assert fourth.block is not other  # Nobody received what was sent.


# ---------------------------------------------------------------- offline to online


def test_a_memory_begins_with_a_dataset(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url) as dataset:
        memory = dataset.to_memory(500, keep_extras=False, sampler=holdall.NStep(3, 0.9), seed=0)
    with memory:
        count = len(recording.oracle)
        expected = recording.oracle.gather(recording.oracle.ids)
        found = memory.gather(np.arange(count))
        assert_same_bits(found.obs, expected.obs)
        assert_same_bits(found.next_obs, expected.next_obs)
        assert_same_bits(found.reward, expected.reward)
        assert found.extras == {}
        assert bool(found.terminated[-1]) or bool(found.truncated[-1])
        assert_same_bits(found.truncated[:-1], expected.truncated[:-1])
        step = Stream(SPACE, spaces.Discrete(5), seed=8).tick()
        for _ in range(30):
            memory.add(**step.arguments())
        assert len(memory) == count + 30
        assert_same_bits(memory.gather([count + 3]).obs, step.obs)
        assert len(memory.sample(64).ids) == 64


def test_a_small_memory_keeps_the_newest_steps(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url) as dataset, dataset.to_memory(50) as memory:
        assert (memory.first_id, memory.next_id) == (dataset.next_id - 50, dataset.next_id)
        assert_same_bits(memory.gather([dataset.next_id - 9]).obs, recording.oracle.gather([dataset.next_id - 9]).obs)


def test_priorities_begin_with_the_steps_of_the_dataset(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url) as dataset:
        memory = dataset.to_memory(500, sampler=holdall.Prioritized(), seed=0)
        with memory:
            drawn = memory.sample(100)
            memory.update_priorities(drawn.ids, np.full(100, 0.5))
            assert set(memory.sample(100).ids.tolist()) <= set(range(len(dataset)))


def test_a_saved_memory_of_a_dataset_has_everything(recording: Recording, tmp_path: Path) -> None:
    with holdall.Dataset.open(recording.url) as dataset, dataset.to_memory(500) as memory:
        memory.save(tmp_path / "online").result()
    with holdall.Dataset.open(tmp_path / "online") as again:
        assert_same_bits(again.gather(np.arange(100)), recording.oracle.gather(np.arange(100)))


# ---------------------------------------------------------------- wrong use


def record_timestamps(folder: Path, interval: float, metadata: dict[str, Any] | None = None) -> Path:
    space = spaces.Box(-1, 1, (2,), np.float32)
    flag = np.zeros(1, np.bool_)
    with holdall.ReplayMemory(space, space, 50, extras={"timestamp": EXTRAS["timestamp"]}) as memory:
        for tick in range(30):
            row = np.full((1, 2), tick, np.float32)
            stamp = {"timestamp": np.full(1, tick % 10 * interval, np.float32)}
            memory.add(row, row, np.zeros(1), row + 1, flag, np.full(1, tick % 10 == 9), extras=stamp)
        attach = {} if metadata is None else {METADATA: json.dumps(metadata).encode()}
        memory.save(folder, attach=attach).result()
    return folder


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a key": ({"delta_timestamps": {"observation.imgae": [0.0]}, "fps": 10}, "observation.image"),
    "keys": ({"keys": ["rewards"]}, "'rewards', which the dataset does not have"),
    "no fps": ({"delta_timestamps": {"action": [0.1]}}, "fps=10"),
    "no steps in a second": ({"delta_timestamps": {"action": [0.0]}, "fps": 0}, r"^fps \(0\) must be a number above 0"),
    "a delta between two steps": ({"delta_timestamps": {"action": [0.15]}, "fps": 10}, "multiples of this interval"),
    "no list": ({"delta_timestamps": {"action": 0.1}, "fps": 10}, "list of seconds"),
    "no numbers": ({"delta_timestamps": {"action": ["soon"]}, "fps": 10}, "list of seconds"),
    "no dict": ({"delta_timestamps": [0.1], "fps": 10}, "Pass a dict"),
    "left out": ({"delta_timestamps": {"action": [0.1]}, "fps": 10, "keys": ["reward"]}, "Add it to keys"),
    "two kinds of windows": (
        {"delta_timestamps": {"action": [0.1]}, "fps": 10, "sampler": holdall.NStep(2, 0.9)},
        "Pass one of them",
    ),
    "a sampler": ({"sampler": holdall.Prioritized()}, "weights"),
    "fps": ({"fps": -1}, "fps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_error_of_a_wrong_argument_has_a_remedy(recording: Recording, case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(ArgumentError, match=message):
        holdall.Dataset.open(recording.url, **arguments)


def test_an_fps_other_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    stamped = record_timestamps(tmp_path / "stamped", 0.05)
    with pytest.raises(ArgumentError, match=r"which are 0\.05 s apart. Pass fps=20"):
        holdall.Dataset.open(stamped, fps=10)
    with holdall.Dataset.open(stamped, fps=20) as dataset:
        assert dataset.fps == 20
    recorded = record_timestamps(tmp_path / "recorded", 0.05, {"fps": 20})
    with pytest.raises(ArgumentError, match=r"fps \(30\) differs from the recorded 20"):
        holdall.Dataset.open(recorded, fps=30)
    with holdall.Dataset.open(recorded, delta_timestamps={"action": [-0.05]}) as dataset:
        assert dataset.fps == 20


def test_an_extra_may_have_a_name_like_a_next_observation(tmp_path: Path) -> None:
    """With windows, next observations are left out, because the windows contain the following steps."""
    extras = {"next_observation_error": spaces.Box(-1, 1, (), np.float32)}
    with holdall.ReplayMemory(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 100, extras=extras) as memory:
        obs = np.zeros(3, np.float32)
        for step in range(10):
            error = {"next_observation_error": np.float32(step / 10)}
            memory.add(obs, 0, 0.0, obs, terminated=False, truncated=False, extras=error)
        memory.save(tmp_path).result()
    with holdall.Dataset.open(tmp_path, delta_timestamps={"action": [0.0, 0.1]}, fps=10) as dataset:
        assert dataset[4]["next_observation_error"] == np.float32(0.4)
        assert "next_observation" not in dataset[4]


def test_a_place_that_is_being_written_is_refused(tmp_path: Path) -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    row = np.zeros((1, 2), np.float32)
    flag = np.zeros(1, np.bool_)
    with holdall.ReplayMemory(space, space, 50) as memory:
        memory.add(row, row, np.zeros(1), row, flag, flag)
        memory.save(tmp_path).result()
        with pytest.raises(ArgumentError, match=f"is being written by process {os.getpid()}.*allow_writer=True"):
            holdall.Dataset.open(tmp_path)
        with holdall.Dataset.open(tmp_path, allow_writer=True) as dataset:
            memory.add(row, row, np.zeros(1), row, flag, flag)
            memory.save(tmp_path, keep=1).result()
            assert len(dataset) == 1
            with pytest.raises(CheckpointError, match="was removed after the dataset was opened"):
                pickle.loads(pickle.dumps(dataset))
    with holdall.Dataset.open(tmp_path) as dataset:
        assert len(dataset) == 2


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No complete checkpoint found"):
        holdall.Dataset.open(tmp_path / "nothing")


def test_an_index_outside_of_the_dataset_is_refused(recording: Recording) -> None:
    with holdall.Dataset.open(recording.url) as dataset:
        for index in (len(dataset), -len(dataset) - 1):
            with pytest.raises(TransitionIdError, match="outside of the dataset"):
                dataset[index]
            with pytest.raises(TransitionIdError, match="outside of the dataset"):
                dataset[[0, index]]


def test_use_after_close_is_refused_and_rows_stay_valid(recording: Recording) -> None:
    dataset = holdall.Dataset.open(recording.url)
    row = dataset[3]
    dataset.close()
    uses: list[Callable[[], Any]] = [lambda: dataset[0], lambda: pickle.dumps(dataset), lambda: dataset.to_memory(9)]
    for use in uses:
        with pytest.raises(ClosedError, match="was closed"):
            use()
    assert_same_bits(row["reward"], recording.row(3, "reward"))
