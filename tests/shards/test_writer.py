"""Writers: calls that raise and are repeated, flushes at their end, and errors about shards that accept nothing."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
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

from .processes import (
    change_settings,
    find_process,
    forget_all,
    make_config,
    make_impatient_writer,
    make_writer,
    repeat_until_accepted,
    wait_until,
)

# Workers cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPACE = spaces.Box(-1, 1, (3,), np.float32)
ACTION = spaces.Discrete(2)


def add(target: Any, number: int) -> None:
    row = np.zeros((1, 3), np.float32)
    no = np.zeros(1, np.bool_)
    target.add(row, np.zeros(1, np.int64), np.full(1, number, np.float32), row, no, no)


def make_steps(first: int, end: int) -> tuple[Any, ...]:
    rows = np.zeros((end - first, 1, 3), np.float32)
    no = np.zeros((end - first, 1), np.bool_)
    return rows, no.astype(np.int64), np.arange(first, end, dtype=np.float32)[:, None], rows, no, no


def read_numbers(memory: ReplayMemory) -> list[int]:
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


def test_a_call_that_raised_can_be_repeated_and_doubles_nothing(memory: ReplayMemory) -> None:
    forget_all(memory)
    writer, other = (make_impatient_writer(memory) for _ in range(2))
    for one in (writer, other):
        one.add(*(part[0] for part in make_steps(9_999, 10_000)))
        repeat_until_accepted(one.flush)
    shard = psutil.Process(find_process(memory._members.handle(0)))
    shard.send_signal(signal.SIGSTOP)
    added = 0
    try:
        for _ in range(3):
            with pytest.raises(ShardError):  # noqa: PT012  which of them it is does not matter
                while added < 2_000:  # The number of waiting rows is bounded.
                    add(writer, added)
                    added += 1
        for _ in range(2):
            with pytest.raises(ShardError, match="are kept"):
                other.extend(*make_steps(2_000, 8_000))
        assert other.unacknowledged_rows + other.waiting_rows < 5_000
    finally:
        shard.send_signal(signal.SIGCONT)
    repeat_until_accepted(lambda: other.extend(*make_steps(2_000, 8_000)))
    repeat_until_accepted(lambda: other.extend(*make_steps(8_000, 8_100)))  # Other steps than in the call that raised.
    repeat_until_accepted(writer.flush)
    repeat_until_accepted(other.flush)
    assert read_numbers(memory) == [*range(added), *range(2_000, 8_100), 9_999, 9_999]


def take_segments(memory: ReplayMemory) -> list[int]:
    """Return the number of rows of every segment that the only shard holds, and drop them."""
    shard = memory._members.handle(0)
    rows = ray.get(shard.__ray_call__.remote(lambda it: [each.ticks for each in it._data.store.list_segments()]))
    forget_all(memory)
    return [count for count in rows if count]


@pytest.mark.parametrize(("gather_s", "rows"), [(1e9, 512), (0.0, 128)])
def test_steps_that_come_quickly_are_sent_in_larger_segments(gather_s: float, rows: int, memory: ReplayMemory) -> None:
    """Except for steps of `add`, for memories with a limit, and for samplers that follow episodes."""
    forget_all(memory)
    writer = make_writer(memory, tuning=ClusterTuning(gather_s=gather_s))
    for number in range(40):
        writer.extend(*make_steps(64 * number, 64 * number + 64))
    writer.flush()
    assert take_segments(memory) == [rows] * (40 * 64 // rows)
    for number in range(300):
        add(writer, number)
    writer.flush()
    assert take_segments(memory) == [128, 128, 44]
    limited = change_settings(memory, limit=RateLimit(1.0, 1, 1e6))
    following = replace(memory._config, sampler=Sequence(4), shard_rows=400)
    for config in (limited, following):
        careful = Writer(config, 1)
        careful.extend(*make_steps(0, 1_000))
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
    patient = make_writer(memory, lanes, tuning=ClusterTuning(gather_s=1e9))
    patient.extend(*block)
    patient.flush()
    most = max(1, 512 // lanes)
    assert take_segments(memory) == [lanes * most] * (ticks // most) + [lanes * (ticks % most)] * (ticks % most > 0)


def test_a_flush_in_another_thread_keeps_the_order_of_transitions(memory: ReplayMemory) -> None:
    """At the end of a process, a writer is flushed while other threads may still use it."""
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
    """An actor that never calls flush."""

    def __init__(self, writer: Writer, first: int) -> None:
        self.writer = writer
        for number in range(first, first + 200):
            add(self.writer, number)

    def leave(self) -> None:
        ray.actor.exit_actor()


def test_every_end_of_a_writer_flushes_it(memory: ReplayMemory) -> None:
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
    del gone
    wait_until(lambda: len(memory) >= 703)
    assert read_numbers(memory) == list(range(703))


def test_rows_in_flight_are_counted_while_another_thread_sends_them() -> None:
    """An error would end the thread that reads the metrics."""
    members: Any = SimpleNamespace(handle=lambda _: None)
    stream = SegmentStream(members, 0, b"", ClusterTuning())
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            stream.in_flight.extend([SentSegment(b"", 1, None)] * 8)
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


def test_a_dropped_writer_is_freed_at_once(memory: ReplayMemory) -> None:
    forget_all(memory)
    writer = memory.writer()
    add(writer, 0)
    streams = weakref.ref(writer._streams)
    del writer
    assert streams() is None  # Freed without the garbage collector.
    assert read_numbers(memory) == [0]


@pytest.mark.nightly
def test_writers_that_end_at_the_same_time_end_no_shard(memory: ReplayMemory) -> None:
    # Ray gives the calls of ending actors the same ids. A shard that executes two calls with one id ends.
    forget_all(memory)
    feeder: Any = ray.remote(num_cpus=0)(Feeder)
    feeders = [feeder.remote(memory.writer(), 200 * number) for number in range(4)]
    ray.get([each.__ray_ready__.remote() for each in feeders])
    epochs = [status.counters.epoch for status in memory.shards() if status.counters is not None]
    del feeders
    wait_until(lambda: len(memory) >= 800)
    assert read_numbers(memory) == list(range(800))
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


@pytest.mark.nightly  # In make test, `test_every_end_of_a_writer_flushes_it` has most of the ends.
def test_the_end_of_a_program_flushes_its_writers(memory: ReplayMemory) -> None:
    forget_all(memory)
    head = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, memory.name, head]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    assert read_numbers(memory) == list(range(200))


def test_a_writer_does_not_start_ray_again_after_it_was_shut_down(memory: ReplayMemory) -> None:
    forget_all(memory)
    program = f"""{DRIVER}
import ray
ray.shutdown()
memory._members._listed_at = -1e9  # As if the list of shards were old.
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
    *errors, is_initialized = ended.stdout.splitlines()
    assert [line.startswith("Ray was shut down, and the memory ended with it") for line in errors] == [True] * 6
    assert is_initialized == "False"
    assert "A writer ended with 200 transitions" in ended.stderr


@pytest.mark.nightly
def test_closing_a_memory_with_journals_flushes_it(cluster: None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shards": 1, "durability": "segment", "url": tmp_path}
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as memory:
        add(memory, 0)
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as again:
        assert read_numbers(again) == [0]


@pytest.mark.nightly
def test_a_replaced_memory_raises_fenced_errors(cluster: None, tmp_path: Path) -> None:
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
            assert read_numbers(new) == [0]


def test_an_idle_shard_notices_that_it_was_replaced(tmp_path: Path) -> None:
    tuning = ClusterTuning(ownership_s=0.01)
    first = open_journal(str(tmp_path), 0, tuning)
    list(first.open())
    first.start(range(0), lambda _: range(0), lambda: None)
    for _ in range(20):  # Its own slots are not those of another shard.
        first.set_state(first_row=0)
    assert first.fenced is None
    list(open_journal(str(tmp_path), 0, tuning).open())
    wait_until(lambda: first.fenced is not None)


def test_the_trouble_of_a_journal_names_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(CheckpointError, match="No space left"):  # A journal that was not started raises the error.
        opened.set_state(first_row=0)
    opened.start(range(0), lambda _: range(0), lambda: None)
    writing = threading.Thread(target=lambda: opened.set_state(first_row=0))
    writing.start()
    wait_until(lambda: "No space left" in opened.trouble)
    is_full.clear()
    writing.join()
    assert opened.trouble == ""


@pytest.mark.usefixtures("cluster")
def test_the_error_names_the_shard_on_which_a_writer_must_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0 has room, but the episodes of the writer continue on shard 1."""
    handle = SimpleNamespace(trouble=SimpleNamespace(remote=lambda: ray.put("its disk is full")))
    members = Members(None, 1.0, ClusterTuning())
    members._set_handles({0: handle, 1: handle})
    monkeypatch.setattr(members, "refresh_list", lambda: None)
    monkeypatch.setattr(SegmentStream, "has_room", property(lambda stream: stream.number == 0))
    streams = ShardStreams(make_config({}, 1_000, tmp_path, writer_patience_s=0.0), members)
    streams._home = 1
    with pytest.raises(ShardError, match=r"^Shard 1 .*its disk is full"):
        streams.choose_stream()


@pytest.mark.nightly
def test_adding_a_shard_without_room_changes_nothing(cluster: None) -> None:
    settings: dict[str, Any] = {"shards": 1, "resources": {"num_cpus": 3.0}, "patience_s": 5.0}  # Of four CPUs.
    with ReplayMemory(SPACE, ACTION, 1_000, **settings) as memory:
        add(memory, 0)
        with pytest.raises(ShardError, match=r"did not start within 5 s .* no room"):
            memory.add_shard()
        assert memory.num_shards == 1
        assert read_numbers(memory) == [0]


@pytest.mark.nightly
def test_the_log_says_what_a_call_waits_for(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
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
        memory.extend(*make_steps(0, 1_500))
        memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path, shards=2) as fewer:
        assert fewer.num_shards == 2
        assert read_numbers(fewer) == list(range(1_500))
        fewer.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as same:
        assert same.num_shards == 2
        assert read_numbers(same) == list(range(1_500))
    with pytest.raises(ArgumentError, match="shards"):
        ReplayMemory.load(tmp_path, shards=0)
