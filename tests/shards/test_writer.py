"""Writers: what a call that raised holds, what their end flushes, and what they say of a shard that takes nothing."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from gymnasium import spaces

from holdall import ArgumentError, CheckpointError, FencedError, Sequence, ShardError
from holdall.checkpoint.directory_blobs import FileSystem
from holdall.cluster.journal import open_journal
from holdall.cluster.members import Members
from holdall.cluster.stream import SegmentStream, SentSegment, ShardStreams
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import RateLimit, ReplayMemory, Writer

from .processes import forget_all, process_of, repeat, shard_config, wait_until, writer_with

# Workers have no tests to import.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPACE = spaces.Box(-1, 1, (3,), np.float32)
ACTION = spaces.Discrete(2)


def add(target: Any, number: int) -> None:
    row = np.zeros((1, 3), np.float32)
    no = np.zeros(1, np.bool_)
    target.add(row, np.zeros(1, np.int64), np.full(1, number, np.float32), row, no, no)


def steps(first: int, end: int) -> tuple[Any, ...]:
    rows = np.zeros((end - first, 1, 3), np.float32)
    no = np.zeros((end - first, 1), np.bool_)
    return rows, no.astype(np.int64), np.arange(first, end, dtype=np.float32)[:, None], rows, no, no


def held(memory: ReplayMemory) -> list[int]:
    memory.flush()
    found: list[int] = []
    for shard, counters in memory._members.refresh().items():
        rows = np.arange(counters.first_row, counters.next_row) + (shard << 48)
        found += memory.gather(rows).reward.astype(int).tolist()
    return sorted(found)


@pytest.fixture(scope="module")
def memory(cluster: None) -> Iterator[ReplayMemory]:
    with ReplayMemory(SPACE, ACTION, 40_000, shards=1, patience_s=1.0) as made:
        yield made


def test_a_call_that_raised_can_be_made_again_and_doubles_nothing(memory: ReplayMemory) -> None:
    forget_all(memory)
    writer, other = (writer_with(memory, writer_patience_s=0.1) for _ in range(2))
    for one in (writer, other):
        one.add(*(part[0] for part in steps(9_999, 10_000)))
        repeat(one.flush)
    shard = psutil.Process(process_of(memory._members.handle(0)))
    shard.send_signal(signal.SIGSTOP)
    added = 0
    try:
        for _ in range(3):
            with pytest.raises(ShardError):  # noqa: PT012  which of them it is does not matter
                while added < 2_000:  # what waits is bounded
                    add(writer, added)
                    added += 1
        for _ in range(2):
            with pytest.raises(ShardError, match="are kept"):
                other.extend(*steps(2_000, 8_000))
        assert other.unacknowledged_rows + other.waiting_rows < 5_000
    finally:
        shard.send_signal(signal.SIGCONT)
    repeat(lambda: other.extend(*steps(2_000, 8_000)))
    repeat(lambda: other.extend(*steps(8_000, 8_100)))  # another one is not taken for the first
    repeat(writer.flush)
    repeat(other.flush)
    assert held(memory) == [*range(added), *range(2_000, 8_100), 9_999, 9_999]


def take_segments(memory: ReplayMemory) -> list[int]:
    """Return the rows of every segment that the only shard holds, and have it forget them."""
    shard = memory._members.handle(0)
    rows = ray.get(shard.__ray_call__.remote(lambda it: [each.ticks for each in it._data.store.list_segments()]))
    forget_all(memory)
    return [count for count in rows if count]


@pytest.mark.parametrize(("gather_s", "rows"), [(1e9, 512), (0.0, 128)])
def test_blocks_that_come_quickly_go_in_larger_segments(gather_s: float, rows: int, memory: ReplayMemory) -> None:
    """Steps one by one do not, nor does anything that a limiter, or a sampler of episodes, counts in segments."""
    forget_all(memory)
    writer = writer_with(memory, tuning=ClusterTuning(gather_s=gather_s))
    for number in range(40):
        writer.extend(*steps(64 * number, 64 * number + 64))
    writer.flush()
    assert take_segments(memory) == [rows] * (40 * 64 // rows)
    for number in range(300):
        add(writer, number)
    writer.flush()
    assert take_segments(memory) == [128, 128, 44]
    changes: list[dict[str, Any]] = [{"limit": RateLimit(1.0, 1, 1e6)}, {"sampler": Sequence(4), "shard_rows": 400}]
    for change in changes:
        careful = writer_with(memory, **change)
        careful.extend(*steps(0, 1_000))
        careful.flush()
        assert take_segments(memory) == [128] * 7 + [104]


@pytest.mark.parametrize("lanes", [100, 128, 129, 600])
def test_a_writer_of_many_lanes_sends_whole_ticks(lanes: int, memory: ReplayMemory) -> None:
    forget_all(memory)
    writer = memory.writer(num_envs=lanes)
    ticks = 7
    rows = np.zeros((ticks, lanes, 3), np.float32)
    no = np.zeros((ticks, lanes), np.bool_)
    block = rows, no.astype(np.int64), no.astype(np.float32), rows, no, no
    for tick in range(ticks):
        writer.add(*(part[tick] for part in block))
    writer.flush()
    assert take_segments(memory) == [lanes] * ticks
    patient = writer_with(memory, lanes, tuning=ClusterTuning(gather_s=1e9))
    patient.extend(*block)
    patient.flush()
    most = max(1, 512 // lanes)
    assert take_segments(memory) == [lanes * most] * (ticks // most) + [lanes * (ticks % most)] * (ticks % most > 0)


def test_a_writer_that_is_flushed_while_it_adds_sends_in_order(memory: ReplayMemory) -> None:
    """At the end of a process a writer is flushed, whatever its other threads do with it."""
    forget_all(memory)
    writer = memory.writer()
    is_over = threading.Event()

    def flush() -> None:
        while not is_over.is_set():
            writer.flush()

    flushing = threading.Thread(target=flush)
    flushing.start()
    try:
        for number in range(1_500):
            add(writer, number)
    finally:
        is_over.set()
        flushing.join()
    writer.close()
    counters = memory._members.refresh()[0]
    rewards = memory.gather(np.arange(counters.first_row, counters.next_row)).reward
    assert rewards.astype(int).tolist() == list(range(1_500))


@ray.remote(num_cpus=0)
def feed_and_drop(writer: Writer) -> None:
    for number in range(300):
        add(writer, number)


class Feeder:
    """An actor of a user's that never calls flush."""

    def __init__(self, writer: Writer, first: int) -> None:
        self.writer = writer
        for number in range(first, first + 200):
            add(self.writer, number)

    def leave(self) -> None:
        ray.actor.exit_actor()


def test_a_writer_that_is_dropped_closed_left_or_whose_process_ends_has_flushed(memory: ReplayMemory) -> None:
    forget_all(memory)
    ray.get(feed_and_drop.remote(memory.writer()))
    feeder: Any = ray.remote(num_cpus=0)(Feeder)
    ending = feeder.remote(memory.writer(), 300)
    dropped = feeder.remote(memory.writer(), 500)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ending.leave.remote())
    ray.get(dropped.__ray_ready__.remote())
    del dropped
    with memory.writer() as left:
        add(left, 700)
    closed = memory.writer()
    add(closed, 701)
    closed.close()
    gone = memory.writer()
    add(gone, 702)
    del gone  # at once: nothing else refers to it
    wait_until(lambda: len(memory) >= 703)
    assert held(memory) == list(range(703))


def test_rows_under_way_are_counted_while_others_send_them() -> None:
    """Metrics are read in a thread of their own, which an error would end."""
    members: Any = SimpleNamespace(handle=lambda _: None)
    stream = SegmentStream(members, 0, b"", ClusterTuning())
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            stream.in_flight.extend([SentSegment(b"", 1, -1)] * 8)
            stream.in_flight.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        assert all(stream.unacknowledged_rows % 8 == 0 for _ in range(20_000))
    finally:
        is_over.set()
        sending.join()
        sys.setswitchinterval(before)


def test_a_writer_that_is_dropped_takes_no_memory_any_more(memory: ReplayMemory) -> None:
    forget_all(memory)
    writer = memory.writer()
    add(writer, 0)
    streams = weakref.ref(writer._streams)
    del writer
    assert streams() is None  # at once, without the collector
    assert held(memory) == [0]


@pytest.mark.nightly
def test_writers_that_end_at_once_end_no_shard(memory: ReplayMemory) -> None:
    # Ray gives calls that actors make at their end the same names, and a shard that runs two of one name is ended.
    forget_all(memory)
    feeder: Any = ray.remote(num_cpus=0)(Feeder)
    feeders = [feeder.remote(memory.writer(), 200 * number) for number in range(4)]
    ray.get([each.__ray_ready__.remote() for each in feeders])
    epochs = [status.counters.epoch for status in memory.shards() if status.counters is not None]
    del feeders
    wait_until(lambda: len(memory) >= 800)
    assert held(memory) == list(range(800))
    assert epochs == [status.counters.epoch for status in memory.shards() if status.counters is not None]


DRIVER = """
import sys
import numpy as np
import holdall.ray

memory = holdall.ray.attach(sys.argv[1], address=sys.argv[2])
row, no = np.zeros((1, 3), np.float32), np.zeros(1, np.bool_)
for number in range(200):
    memory.add(row, np.zeros(1, np.int64), np.full(1, number, np.float32), row, no, no)
"""


@pytest.mark.nightly  # in make test, one of the ways in which a writer ends
def test_a_program_that_ends_without_flush_has_flushed(memory: ReplayMemory) -> None:
    forget_all(memory)
    head = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, memory.name, head]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    assert held(memory) == list(range(200))


def test_a_writer_does_not_start_ray_again_after_it_was_shut_down(memory: ReplayMemory) -> None:
    forget_all(memory)
    program = f"""{DRIVER}
import ray
ray.shutdown()
memory._members._listed_at = -1e9  # as if it were time to look for shards
for call in (memory.flush, lambda: memory.sample(8), memory.writer, memory.shards, lambda: len(memory), memory.close):
    try:
        call()
    except holdall.HoldallError as error:
        print(error)
print(ray.is_initialized())
"""
    command = [sys.executable, "-c", program, memory.name, ray.get_runtime_context().gcs_address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    *said, is_there = ended.stdout.splitlines()
    assert [line.startswith("Ray was shut down, and the memory ended with it") for line in said] == [True] * 6
    assert is_there == "False"
    assert "A writer ended with 200 transitions" in ended.stderr


@pytest.mark.nightly
def test_a_memory_with_journals_that_is_closed_has_flushed(cluster: None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shards": 1, "durability": "segment", "url": tmp_path}
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as memory:
        add(memory, 0)
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as again:
        assert held(again) == [0]


@pytest.mark.nightly
def test_a_writer_and_a_learner_of_a_memory_that_was_replaced_hear_so(cluster: None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shards": 1, "durability": "segment", "url": tmp_path}
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as old:
        writer = old.writer()
        add(writer, 0)
        writer.flush()
        with ReplayMemory(SPACE, ACTION, 1_000, **settings) as new:
            add(writer, 1)
            for _ in range(2):
                with pytest.raises(FencedError, match="another shard has opened"):
                    writer.flush()
            with pytest.raises(FencedError, match="use the new one"):
                old.sample(1)
            writer.close(flush=False)
            assert held(new) == [0]


def test_a_shard_that_is_given_nothing_notices_that_it_was_replaced(tmp_path: Path) -> None:
    tuning = ClusterTuning(ownership_s=0.01)
    first = open_journal(str(tmp_path), 0, tuning)
    list(first.open())
    first.start(range(0), lambda _: range(0), lambda: None)
    for _ in range(20):  # what it writes itself is not taken for another's
        first.set_state(first_row=0)
    assert first.fenced is None
    list(open_journal(str(tmp_path), 0, tuning).open())
    wait_until(lambda: first.fenced is not None)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_journal(str(tmp_path), 0, ClusterTuning(retry_s=0.01))
    list(opened.open())
    is_full = threading.Event()
    is_full.set()

    def write(disk: Any, file: int, content: bytes) -> None:
        if is_full.is_set():
            raise OSError(28, "No space left on device")
        written(disk, file, content)

    disk = FileSystem
    written = disk.write
    monkeypatch.setattr(disk, "write", write)
    with pytest.raises(CheckpointError, match="No space left"):  # one that is new says so at once
        opened.set_state(first_row=0)
    opened.start(range(0), lambda _: range(0), lambda: None)
    telling = threading.Thread(target=lambda: opened.set_state(first_row=0))
    telling.start()
    wait_until(lambda: "No space left" in opened.trouble)
    is_full.clear()
    telling.join()
    assert opened.trouble == ""


@pytest.mark.usefixtures("cluster")
def test_a_writer_that_must_stay_on_a_shard_names_that_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0 has room, but the episodes of the writer continue on shard 1."""
    handle = SimpleNamespace(trouble=SimpleNamespace(remote=lambda: ray.put("its disk is full")))
    members = Members(None, 1.0, ClusterTuning())
    members._set_handles({0: handle, 1: handle})
    monkeypatch.setattr(members, "refresh_list", lambda: None)
    monkeypatch.setattr(SegmentStream, "has_room", property(lambda stream: stream.number == 0))
    streams = ShardStreams(shard_config({}, 1_000, tmp_path)._replace(writer_patience_s=0.0), members)
    streams._home = 1
    with pytest.raises(ShardError, match=r"^Shard 1 .*its disk is full"):
        streams.choose_stream()


@pytest.mark.nightly
def test_a_shard_without_room_is_refused_and_disturbs_nobody(cluster: None) -> None:
    settings: dict[str, Any] = {"shards": 1, "resources": {"num_cpus": 3.0}, "patience_s": 5.0}  # of four CPUs
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as memory:
        add(memory, 0)
        with pytest.raises(ShardError, match=r"did not start within 5 s .* no room"):
            memory.add_shard()
        assert memory.num_shards == 1
        assert held(memory) == [0]


@pytest.mark.nightly
def test_the_limiter_says_what_it_waits_for(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    limit = RateLimit(samples_per_insert=1.0, min_size=2, tolerance=200.0)
    with (
        caplog.at_level(logging.WARNING, "holdall"),
        ReplayMemory(SPACE, ACTION, 1_000, shards=1, limit=limit, _tuning=ClusterTuning(notice_s=0.05)) as memory,
    ):
        drawing = threading.Thread(target=lambda: memory.sample(1))
        drawing.start()
        wait_until(lambda: "0 transitions were added" in caplog.text and "no writer has asked" in caplog.text)
        assert f"min_size={limit.min_size}" in caplog.text
        with memory.writer() as writer:
            add(writer, 0)
            add(writer, 1)
        drawing.join()


@pytest.mark.nightly
def test_a_checkpoint_loads_on_another_number_of_shards(cluster: None, tmp_path: Path) -> None:
    with ReplayMemory(SPACE, ACTION, 4_000, shards=3) as memory:
        memory.extend(*steps(0, 1_500))
        memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path, shards=2) as fewer:
        assert fewer.num_shards == 2
        assert held(fewer) == list(range(1_500))
        fewer.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as same:
        assert same.num_shards == 2
        assert held(same) == list(range(1_500))
    with pytest.raises(ArgumentError, match="shards"):
        ReplayMemory.load(tmp_path, shards=0)
