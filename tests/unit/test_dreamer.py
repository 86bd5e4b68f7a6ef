"""holdall.dreamer.Replay: sequences of each worker's steps, rewritten latents, and refused arguments."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdall
from holdall.dreamer import Replay
from holdall.errors import ArgumentError, CheckpointError
from holdall.store.tuning import Tuning

SMALL = Tuning(
    max_segment_ticks=32, block_bytes=8_000, segments_per_capacity=4, min_segment_ticks=8, small_field_bytes=256
)
LATENTS = ("dyn/deter", "dyn/stoch")


class Player:
    """Plays episodes with several workers, and remembers every step that was added."""

    def __init__(self, replay: Replay, seed: int = 0) -> None:
        self.replay = replay
        self.generator = np.random.default_rng(seed)
        self.steps: dict[int, dict[str, Any]] = {}  # By the number in "count".
        self.streams: dict[int, list[int]] = {}

    def make_step(self, is_wide: bool = False) -> dict[str, Any]:
        draw = self.generator
        words = draw.integers(0, 2**32, 60, np.uint32)
        return {
            "image": draw.integers(0, 255, (12, 12, 3), np.uint8),
            "reward": np.float32(draw.standard_normal()),
            "is_first": draw.random() < 0.1,
            "is_last": draw.random() < 0.1,
            "is_terminal": np.bool_(draw.random() < 0.1),
            "action": draw.standard_normal(3).astype(np.float32),
            "count": np.int32(len(self.steps)),
            "dyn/deter": (words if is_wide else words & np.uint32(0xFFFF0000)).view(np.float32),
            "dyn/stoch": np.eye(5, dtype=np.float32)[draw.integers(0, 5, 4)],
        }

    def add(self, count: int, workers: int = 1) -> None:
        for _ in range(count):
            worker = int(self.generator.integers(workers))
            step = self.make_step()
            number = len(self.steps)
            self.replay.add(step | {"log/speed": 3}, worker)
            self.steps[number] = {key: np.array(value) for key, value in step.items()}
            self.streams.setdefault(worker, []).append(number)

    def check(self, data: dict[str, Any]) -> None:
        """Compare every step of a batch with the step that was added, and the latents that were written last."""
        length = self.replay.length
        assert data.keys() == {*self.make_step(), "stepid"}
        for i, row in enumerate(data["count"]):
            stream = next(stream for stream in self.streams.values() if int(row[0]) in stream)
            first = stream.index(int(row[0]))
            assert row.tolist() == stream[first : first + length]
            for t, number in enumerate(row.tolist()):
                for key, value in self.steps[number].items():
                    if key not in {"is_first", "is_last"}:
                        found = data[key][i, t]
                        assert (found.dtype, found.tobytes()) == (value.dtype, value.tobytes()), key
                assert data["is_first"][i, t] == (t == 0 or self.steps[number]["is_first"])
                is_abandoned = t + 1 < length and self.steps[int(row[t + 1])]["is_first"]
                assert data["is_last"][i, t] == (self.steps[number]["is_last"] or is_abandoned)

    def update(self, data: dict[str, Any], is_wide: bool) -> None:
        """Rewrite latents of a batch without its first step, as DreamerV3 does with one step of context."""
        shape = (*data["count"].shape, 60)
        words = self.generator.integers(0, 2**32, shape, np.uint32)
        deter = (words if is_wide else words & np.uint32(0xFFFF0000)).view(np.float32)
        stoch = np.eye(5, dtype=np.float32)[self.generator.integers(0, 5, (*data["count"].shape, 4))]
        given = {"stepid": data["stepid"], "dyn/deter": deter, "dyn/stoch": stoch}
        self.replay.update({key: array[:, 1:] for key, array in given.items()})
        for i, row in enumerate(data["count"][:, 1:].tolist()):
            for t, number in enumerate(row, 1):
                self.steps[number] |= {"dyn/deter": deter[i, t].copy(), "dyn/stoch": stoch[i, t].copy()}


@given(
    length=st.integers(1, 9),
    capacity=st.integers(1, 120),
    workers=st.integers(1, 4),
    online=st.booleans(),
    budget=st.sampled_from(["auto", None]),
    program=st.lists(
        st.tuples(st.sampled_from(["add", "sample", "update", "update", "wide"]), st.integers(1, 60)), max_size=12
    ),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_sequence_has_the_steps_of_its_worker_and_the_latents_written_last(
    length: int, capacity: int, workers: int, online: bool, budget: str | None, program: list[Any], seed: int
) -> None:
    replay = Replay(length, capacity, online=online, seed=seed, budget=budget, _tuning=SMALL)
    player = Player(replay, seed)
    for name, count in [("add", 60), *program, ("add", 30), ("update", 3), ("sample", 9)]:
        if name == "add":
            player.add(count, workers)
        elif len(replay):
            data = replay.sample(min(count, 8), "train" if count % 2 else "report")
            player.check(data)
            if name != "sample":
                player.update(data, is_wide=name == "wide")
    sequences = sum(max(len(stream) - length + 1, 0) for stream in player.streams.values())
    assert len(replay) == min(sequences, capacity)
    replay.close()


def make_player(steps: int = 300, length: int = 8, **named: Any) -> Player:
    player = Player(Replay(length, named.pop("capacity", 1000), **{"_tuning": SMALL, **named}))
    player.add(steps)
    return player


def test_the_oldest_sequences_are_removed_first() -> None:
    player = make_player(400, capacity=50)
    counts = player.replay.sample(300)["count"]
    assert len(player.replay) == 50
    assert set(counts[:, 0].tolist()) <= set(range(343, 393))


def test_the_newest_steps_are_drawn_once_before_others_if_online() -> None:
    player = make_player(40, online=True)
    assert player.replay.sample(4)["count"][:, 0].tolist() == [1, 9, 17, 25]
    assert player.replay.sample(3, "report")["count"].shape == (3, 8)
    player.add(8)
    assert player.replay.sample(1)["count"][0, 0] == 33


def test_one_seed_draws_the_same_sequences() -> None:
    drawn = [make_player(seed=5).replay.sample(20)["count"].tolist() for _ in range(2)]
    assert drawn[0] == drawn[1] != make_player(seed=6).replay.sample(20)["count"].tolist()


def test_a_batch_belongs_to_the_caller() -> None:
    player = make_player()
    data = player.replay.sample(4)
    for key in ("image", "dyn/deter", "reward", "count"):
        data[key][:] = 1
    player.check(player.replay.sample(16))


def test_a_step_that_occurs_twice_has_its_last_row() -> None:
    player = make_player(9)
    data = player.replay.sample(2)
    given = {"stepid": np.repeat(data["stepid"][:1], 2, axis=0)}
    given["dyn/deter"] = np.stack([np.zeros((8, 60), np.float32), np.ones((8, 60), np.float32)])
    player.replay.update(given)
    first = int(data["count"][0, 0])
    drawn = player.replay.sample(30)
    numbers = drawn["count"].reshape(-1).tolist()
    held = dict(zip(numbers, drawn["dyn/deter"].reshape(-1, 60), strict=True))
    assert all(held[number].tolist() == [1.0] * 60 for number in range(first, first + 8))


def test_updates_of_evicted_steps_and_of_other_replays_are_ignored() -> None:
    player = make_player(60, capacity=20)
    old = player.replay.sample(4)
    player.add(600)
    other = make_player(60, capacity=20).replay.sample(4)
    for data in (old, other):
        player.replay.update({"stepid": data["stepid"], "dyn/deter": np.zeros((4, 8, 60), np.float32)})
    player.check(player.replay.sample(20))


def test_compressed_and_spilled_steps_are_updated(tmp_path: Path) -> None:
    player = make_player(1500, capacity=2000, budget=400_000, spill_dir=tmp_path)
    player.replay.memory.store.wait_idle()
    assert player.replay.memory.disk_bytes > 0
    for _ in range(20):
        data = player.replay.sample(16)
        player.check(data)
        player.update(data, is_wide=False)
    player.check(player.replay.sample(64))
    player.replay.close()


def test_latents_in_bfloat16_take_half_and_discrete_ones_a_bit_per_value() -> None:
    player = make_player(2000, capacity=2000, budget=None, _tuning=None)
    fields = {field.name: field for field in player.replay.memory.report().fields}
    assert fields["extras.dyn/deter"].plain_bytes > 1.9 * fields["extras.dyn/deter"].total_bytes
    assert fields["extras.dyn/stoch"].plain_bytes > 12 * fields["extras.dyn/stoch"].total_bytes


@pytest.mark.parametrize("online", [False, True])
def test_a_loaded_replay_draws_the_batches_that_the_saved_one_draws(online: bool, tmp_path: Path) -> None:
    player = make_player(700, capacity=300, directory=tmp_path / "replay", save_wait=True, seed=3, online=online)
    for _ in range(3):  # Incremental: some steps are rewritten between two checkpoints.
        player.update(player.replay.sample(9), is_wide=False)
        player.replay.save()
        player.add(20)
    player.replay.save()
    again = Replay(8, 300, tmp_path / "replay", online=online, seed=99, _tuning=SMALL)
    again.load()
    assert len(again) == len(player.replay) == 300
    for _ in range(4):
        ours = player.replay.sample(16)
        theirs = again.sample(16)
        assert all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
        assert again.sampler is not player.replay.sampler
    data = player.replay.sample(4)
    again.update({"stepid": data["stepid"], "dyn/deter": np.zeros((4, 8, 60), np.float32)})
    assert not np.array_equal(again.sample(200)["dyn/deter"], player.replay.sample(200)["dyn/deter"])
    copy = Player(again)
    copy.steps = dict(player.steps)
    for number in data["count"].reshape(-1).tolist():
        copy.steps[number] = copy.steps[number] | {"dyn/deter": np.zeros(60, np.float32)}
    copy.streams = {0: list(player.streams[0]), 1: []}
    copy.add(0)
    copy.check(again.sample(50))
    again.add(player.make_step(), worker=7)  # A new stream.
    player.replay.close()
    again.close()


def test_the_newest_sequences_are_loaded_if_an_amount_is_given(tmp_path: Path) -> None:
    player = make_player(200, directory=tmp_path, save_wait=True)
    player.replay.save()
    again = Replay(8, 1000)
    again.load(directory=tmp_path, amount=10)
    assert len(again) == 10
    assert set(again.sample(100)["count"][:, 0].tolist()) <= set(range(183, 193))


def test_saving_and_loading_nothing_does_nothing(tmp_path: Path) -> None:
    Replay(8, 100).save()
    Replay(8, 100, tmp_path / "none").save()
    Replay(8, 100, tmp_path / "none").load()
    assert list(tmp_path.iterdir()) == []


class Last:
    """A selector with the methods of embodied.replay.selectors. It draws the newest sequence."""

    def __init__(self) -> None:
        self.items: dict[int, Any] = {}
        self.priorities: list[Any] = []

    def __call__(self) -> int:
        return max(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __setitem__(self, number: int, step_ids: Any) -> None:
        self.items[number] = step_ids.copy()

    def __delitem__(self, number: int) -> None:
        del self.items[number]

    def prioritize(self, step_ids: Any, priorities: Any) -> None:
        self.priorities.append((step_ids.copy(), priorities.copy()))


def test_a_selector_draws_and_gets_priorities(tmp_path: Path) -> None:
    selector = Last()
    player = make_player(100, capacity=30, selector=selector, directory=tmp_path, save_wait=True)
    data = player.replay.sample(2)
    assert data["count"][:, 0].tolist() == [92, 92]
    assert np.array_equal(selector.items[max(selector.items)], data["stepid"][0])
    assert len(selector) == len(player.replay) == 30
    player.replay.update({"stepid": data["stepid"], "priority": np.ones((2, 8))})
    assert np.array_equal(selector.priorities[0][0], data["stepid"].reshape(-1, 20))
    player.replay.save()
    again = Replay(8, 30, tmp_path, selector=Last())
    again.load()
    assert again.sample(1)["count"][0, 0] == 92


def test_sample_waits_for_the_first_sequence() -> None:
    player = Player(Replay(4, 100))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(player.replay.sample(3)))
    thread.start()
    player.add(4)
    thread.join(60)
    player.check(found[0])


def test_threads_add_sample_and_update_at_once() -> None:
    """As DreamerV3 does: a driver adds, a stream samples, the learner updates."""
    player = make_player(200, capacity=150)
    stop = threading.Event()
    errors: list[BaseException] = []

    def learn() -> None:
        try:
            while not stop.is_set():
                data = player.replay.sample(8)
                assert (np.diff(data["count"], axis=1) == 1).all()
                marks = np.broadcast_to(data["count"][..., None], (8, 8, 60)).astype(np.float32)
                player.replay.update({"stepid": data["stepid"], "dyn/deter": marks})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn) for _ in range(2)]
    for thread in threads:
        thread.start()
    player.add(1500)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    data = player.replay.sample(100)
    marks = data["dyn/deter"] == data["count"][..., None]
    added = np.array([[player.steps[n]["dyn/deter"] for n in row] for row in data["count"].tolist()])
    assert (marks | (data["dyn/deter"].view(np.uint32) == added.view(np.uint32))).all()


def test_stats_count_since_the_last_call() -> None:
    player = make_player(107)
    player.update(player.replay.sample(5), is_wide=False)
    stats = player.replay.stats()
    assert {key: stats[key] for key in ("items", "streams", "inserts", "samples", "updates")} == {
        "items": 100,
        "streams": 1,
        "inserts": 100,
        "samples": 5,
        "updates": 35,
    }
    assert stats["replay_ratio"] == 8 * 5 / 100
    assert stats["ram_gb"] > 0
    assert player.replay.stats()["samples"] == 0


# ---------------------------------------------------------------- refused arguments


def make_step_without(key: str, **others: Any) -> dict[str, Any]:
    step = Player(Replay(2, 9)).make_step() | others
    return {name: value for name, value in step.items() if name != key}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (make_step_without("reward"), r"misses the keys \['reward'\]"),
        (make_step_without("", more=1), r"unknown keys \['more'\]"),
        (make_step_without("", reward=1.0), "'reward' has dtype float64 .* the first step had float32"),
        (make_step_without("", action=np.zeros(4, np.float32)), r"'action' has .* shape \(4,\)"),
    ],
)
def test_a_step_unlike_the_first_is_refused_and_nothing_changes(step: dict[str, Any], says: str) -> None:
    player = make_player(50)
    with pytest.raises(ArgumentError, match=says):
        player.replay.add(step)
    player.add(20)
    player.check(player.replay.sample(50))


@pytest.mark.parametrize("value", ["text", np.datetime64("2026-01-01"), None])
def test_a_value_that_is_not_a_number_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="'bad' has dtype"):
        Replay(2, 9).add({"bad": value})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"stepid": None}, "stepid is missing"),
        ({"stepid": np.zeros((4, 20), np.uint8)}, r"stepid is uint8 of shape \(4, 20\)"),
        ({"dyn/deter": np.zeros((4, 8, 60))}, "'dyn/deter' has dtype float64"),
        ({"dyn/deter": np.zeros((4, 7, 60), np.float32)}, r"shape \(4, 7, 60\), expected float32 and \(4, 8, 60\)"),
        ({"image": np.zeros((4, 8, 12, 12, 3), np.uint8)}, "'image' is stored as an image"),
        ({"enc": np.zeros((4, 8))}, "'enc' is not a key of the steps"),
        ({"priority": np.zeros((4, 8))}, "the selector has no prioritize"),
        ({"priority": np.zeros(4)}, r"priority has shape \(4,\)"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_and_changes_nothing(data: dict[str, Any], says: str) -> None:
    player = make_player(60)
    given = {"stepid": player.replay.sample(4)["stepid"], **data}
    with pytest.raises(ArgumentError, match=says):
        player.replay.update({key: value for key, value in given.items() if value is not None})
    player.check(player.replay.sample(50))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="capacity is None"):
        Replay(8)
    with pytest.raises(ArgumentError, match="mode is 'eva'"):
        make_player().replay.sample(3, "eva")
    with pytest.raises(ArgumentError, match="is empty, so it has no memory"):
        _ = Replay(8, 10).memory
    player = make_player(directory=tmp_path / "replay", save_wait=True)
    player.replay.save()
    with pytest.raises(ArgumentError, match="has steps already"):
        player.replay.load()
    with pytest.raises(ArgumentError, match="sequences of 8 steps, but length is 9"):
        Replay(9, 10, tmp_path / "replay").load()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "20260101T000000-a-b-1024.npz").touch()
    with pytest.raises(ArgumentError, match="chunks of DreamerV3's own Replay"):
        Replay(8, 10, tmp_path / "theirs").load()
    memory = holdall.ReplayMemory(player.replay.memory.schema, None, 10)
    memory.save(tmp_path / "memory").result()
    with pytest.raises(CheckpointError, match="not of a Replay"):
        Replay(8, 10, tmp_path / "memory").load()
