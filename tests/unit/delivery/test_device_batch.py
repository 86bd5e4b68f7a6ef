"""Batches on a device, on a stream without one: the bits of those in arrays, each slice sent once, no allocations."""

from __future__ import annotations

import functools
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import (
    ArgumentError,
    DamageError,
    Hindsight,
    NStep,
    Prioritized,
    ReplayMemory,
    Sequence,
)
from holdall.batch import Batch
from holdall.delivery import device
from holdall.delivery.batches import Delivery
from holdall.delivery.device import DeviceStream
from holdall.delivery.device_batch import DeviceBatches
from holdall.native import CopyPlan, SliceNamer, sending
from holdall.schema import Bytes
from holdall.storage import segment
from holdall.storage.batch_source import Places
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits
from holdall.testing.oracle import as_array, map_leaves
from holdall.testing.strategies import box

SPACES: dict[str, tuple[spaces.Space[Any], list[LeafPlan]]] = {
    "frames first": (box((4, 36, 36), "u1"), [LeafPlan(axis=0)]),
    "frames last": (box((36, 36, 4), "u1"), [LeafPlan(axis=2)]),
    "colour frames last": (box((24, 20, 12), "u1"), [LeafPlan(axis=2, step=3)]),
    "camera": (spaces.Dict(image=box((43, 41, 3), "u1"), state=box((7,), "f4")), []),
    "short rows": (box((700, 3), "f4"), [LeafPlan(axis=0)]),
    "several large": (
        spaces.Dict(far=box((4, 36, 36), "u1"), near=box((50, 50), "u2"), z=box((), "?")),
        [LeafPlan(axis=0)],
    ),
    "vector": (box((5,), "f8"), []),
    "changing its mind": (box((4, 36, 36), "u1"), [LeafPlan(axis=None, later=LeafPlan(axis=0), later_from=90)]),
}


@pytest.fixture(autouse=True)
def stream_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let device="cpu" go the way of a GPU."""
    monkeypatch.setattr(Delivery, "is_remote", property(lambda self: self.torch_device is not None))


def on(where: str) -> dict[str, Any]:
    return {where: "cpu"}


EXTRAS = {"log_prob": box((2,), "f4")}


@functools.lru_cache(maxsize=2 * len(SPACES))  # tests go from one space to the next, and round again
def steps_of(name: str, ticks: int, lanes: int) -> list[dict[str, Any]]:
    """Draw what all memories of a test are fed with."""
    space, plans = SPACES[name]
    mishaps = Mishaps(ends=0.05, skipped_steps=0.02, foreign_next=0.02)
    stream = Stream(space, spaces.Discrete(3), lanes, plans=plans, mishaps=mishaps, extras=EXTRAS)
    return [stream.tick().arguments() for _ in range(ticks)]


def fed(name: str, ticks: int = 150, sampler: Any = None, lanes: int = 2, **options: Any) -> ReplayMemory:
    space, _ = SPACES[name]
    memory = ReplayMemory(space, spaces.Discrete(3), 200, lanes, seed=3, extras=EXTRAS, sampler=sampler, **options)
    for step in steps_of(name, ticks, lanes):
        memory.add(**step)
    return memory


COUNTS = (1, 50, 7, 120, 50)


@functools.lru_cache(maxsize=2 * len(SPACES))
def batches_in_arrays(name: str, budget: str | None) -> list[Batch]:
    """Draw what every memory on a device has to give."""
    with fed(name, budget=budget) as memory:
        memory.drain()
        return [memory.sample(count) for count in COUNTS]


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize("where", ["device", "store_device"])
@pytest.mark.parametrize("launches_here", [False, True])
def test_every_batch_has_the_bits_of_one_in_arrays(
    name: str, budget: str | None, where: str, launches_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw and sealed, sent, fetched by the device or already there; sizes change from batch to batch."""
    monkeypatch.setattr(DeviceStream, "launches_here", launches_here)
    there = fed(name, budget=budget, **on(where))
    there.drain()
    for count, expected in zip(COUNTS, batches_in_arrays(name, budget), strict=True):
        batch = there.sample(count)
        assert isinstance(batch.reward, torch.Tensor)
        assert_same_bits(batch, expected)


@pytest.mark.parametrize("where", ["device", "store_device"])
@pytest.mark.parametrize(
    "sampler",
    [lambda: NStep(3, 0.9), lambda: Sequence(6, 3), Prioritized, lambda: Sequence(5, by=Prioritized())],
    ids=["n-step", "sequence", "prioritized", "prioritized sequence"],
)
def test_every_sampler_goes_the_same_way(sampler: Any, where: str) -> None:
    """Two ids a row, two axes, weights and masks."""
    arrays, there = fed("camera", sampler=sampler()), fed("camera", sampler=sampler(), **on(where))
    stacked, stacked_there = (
        fed("frames first", sampler=sampler()),
        fed("frames first", sampler=sampler(), **on(where)),
    )
    for _ in range(3):
        assert_same_bits(there.sample(40), arrays.sample(40))
        assert_same_bits(stacked_there.sample(40), stacked.sample(40))


@pytest.mark.parametrize("launches_here", [False, True])
def test_hindsight_goes_the_same_way(launches_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goals, vectors or images, are put into a batch that was sent, or that the device has put together."""
    monkeypatch.setattr(DeviceStream, "launches_here", launches_here)
    if launches_here:
        monkeypatch.setattr(DeviceBatches, "fill", None)
    for shape, dtype in (((2,), "f4"), ((40, 40, 3), "u1")):
        space = spaces.Dict(
            observation=box((4, 36, 36), "u1"), achieved_goal=box(shape, dtype), desired_goal=box(shape, dtype)
        )

        def memory(space: Any = space, **options: Any) -> ReplayMemory:
            stream = Stream(space, spaces.Discrete(3), 2)
            sampler = Hindsight(
                "future", 4, lambda achieved, desired, _: (achieved == desired).reshape(len(achieved), -1).mean(1)
            )
            made = ReplayMemory(space, spaces.Discrete(3), 200, 2, seed=1, sampler=sampler, **options)
            made.extend(**stream.ticks(100).arguments())
            return made

        assert_same_bits(memory(device="cpu").sample(40), memory().sample(40))


@pytest.mark.parametrize("name", ["frames first", "camera", "several large", "short rows"])
def test_slices_on_a_device_follow_a_memory_that_grows_and_evicts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments open, close, are sealed and go; what was drawn before stays right."""
    monkeypatch.setattr(DeviceStream, "launches_here", True)
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 30_000)
    space, plans = SPACES[name]
    streams = [Stream(space, spaces.Discrete(3), 2, plans=plans) for _ in range(2)]
    options: dict[str, Any] = {"capacity": 150, "num_envs": 2, "seed": 0, "budget": None}
    arrays = ReplayMemory(space, spaces.Discrete(3), **options)
    there = ReplayMemory(space, spaces.Discrete(3), store_device="cpu", **options)
    kept = []
    for tick in range(400):
        for memory, stream in zip((arrays, there), streams, strict=True):
            memory.add(**stream.tick().arguments())
        if tick % 5 == 4:
            batch, expected = there.sample(10), arrays.sample(10)
            assert_same_bits(batch, expected)
            kept.append((batch, expected))
            del kept[:-8]
    for batch, expected in kept:
        assert_same_bits(batch, expected)


def test_the_slices_of_a_loaded_memory_are_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sealed slices are decoded to be sent."""
    import pickle

    monkeypatch.setattr(DeviceStream, "launches_here", True)
    memory = fed("frames first", budget=None, store_device="cpu")
    memory.drain()
    copied = pickle.loads(pickle.dumps(memory))
    for _ in range(3):
        assert_same_bits(copied.sample(50), memory.sample(50))


def test_every_slice_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of four and the next one are five frames, not eight; frames that rows share are sent once."""
    brought: list[int] = []
    collect = SliceNamer.collect

    def noted(self: SliceNamer, places: Places, field: int, out: Bytes, way: CopyPlan) -> int:
        brought.append(out.nbytes)
        return collect(self, places, field, out, way)

    monkeypatch.setattr(SliceNamer, "collect", noted)
    memory = fed("frames first", device="cpu", lanes=1)
    frames = memory.report().fields[0].slice_bytes // (36 * 36)
    memory.gather(np.repeat(np.arange(memory.first_id, memory.next_id), 3))
    assert 0 < sum(brought) <= frames * 36 * 36


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small batches go in many pieces, by several threads, in more waves than there may be, some sealed."""
    monkeypatch.setenv("HOLDALL_THREADS", "4")
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 30_000)
    for name, nbytes in (("_PIECE_BYTES", 1), ("_BYTES_PER_COLLECTING_THREAD", 1), ("_WAVE_BYTES", 2_000)):
        monkeypatch.setattr(sending, name, nbytes)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["frames first", "colour frames last", "several large", "changing its mind"])
@pytest.mark.parametrize("budget", ["auto", None])
def test_threads_and_waves_change_no_bit(name: str, budget: str | None) -> None:
    """Whoever brings a slice, and with whichever wave it goes."""
    with fed(name, budget=budget) as arrays, fed(name, budget=budget, device="cpu") as there:
        for memory in (arrays, there):
            memory.drain()
        for count in (1, 2, 90, 120) * 5:
            assert_same_bits(there.sample(count), arrays.sample(count))


def sealed(**options: Any) -> ReplayMemory:
    """Hold plain pictures with a number each, compressed but for the newest ones."""
    memory = ReplayMemory(box((80, 80), "u1"), spaces.Discrete(3), 600, budget=None, prefer="memory", seed=3, **options)
    pictures = np.zeros((601, 1, 80, 80), np.uint8)
    pictures.reshape(601, 6400)[:, 100:108] = np.arange(601).view(np.uint8).reshape(601, 8)
    flags = np.zeros((600, 1), bool)
    memory.extend(pictures[:-1], np.ones((600, 1), np.int64), np.ones((600, 1)), pictures[1:], flags, flags)
    memory.drain()
    return memory


def coded(memory: ReplayMemory) -> list[NDArray[np.uint8]]:
    """Return the bytes of all sealed blocks."""
    assert memory._store is not None
    blocks = [closed.parts[0].block for closed in memory._store.large_segments.closed]
    found = [block.sealed.coded.data for block in blocks if block.sealed is not None]
    return [data for data in found if isinstance(data, np.ndarray)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("where", ["device", "store_device"])
def test_sealed_slices_are_decoded_by_every_thread(where: str) -> None:
    """Compressed and raw in one batch."""
    with sealed() as arrays, sealed(**on(where)) as there:
        assert len(coded(there)) > 5
        for count in (1, 300, 599):
            assert_same_bits(there.sample(count), arrays.sample(count))


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_slice_fails_its_batch_alone() -> None:
    """No hand goes on, nothing of the batch is returned, and the next batch is right."""
    with sealed(device="cpu") as memory:
        ids = np.arange(0, 500, 3)
        expected = memory.gather(ids)
        sound = [data.copy() for data in coded(memory)]
        for data in coded(memory):
            data[:] = 255
        with pytest.raises(DamageError, match="nothing of the batch is returned"):
            memory.gather(ids)
        for data, before in zip(coded(memory), sound, strict=True):
            data[:] = before
        assert_same_bits(memory.gather(ids), expected)


def test_layouts_of_ever_new_batches_do_not_pile_up() -> None:
    """Pinned memory is kept for a few sizes of batches, not for every one there was."""
    with fed("vector", device="cpu") as memory:
        for count in range(1, 12):
            memory.sample(count)
        most = memory.report().staging_bytes
        for _ in range(3):
            for count in range(1, 12):
                memory.sample(count)
                assert memory.report().staging_bytes <= most


def test_batches_belong_to_the_caller() -> None:
    """Ten batches held, and views of others, while a hundred are drawn; then their memory is used again."""
    memory = fed("several large", device="cpu")
    held = [memory.sample(32) for _ in range(10)]
    views = [memory.sample(32).next_obs["far"][3:9, 1:] for _ in range(3)]
    copies = map_leaves(lambda leaf: np.array(as_array(leaf)), [(b.obs, b.next_obs, b.reward) for b in held] + views)
    for _ in range(100):
        batch = memory.sample(32)
        map_leaves(lambda leaf: leaf.zero_(), (batch.obs, batch.next_obs, batch.reward))
    now = map_leaves(lambda leaf: np.array(as_array(leaf)), [(b.obs, b.next_obs, b.reward) for b in held] + views)
    assert_same_bits(now, copies)


def test_blocks_are_used_again_when_no_tensor_looks_into_them() -> None:
    """A view of a view is enough to keep one."""
    memory = fed("camera", device="cpu")
    first = memory.sample(40).obs["image"]
    place, view = first.data_ptr(), first[10:].view(30, -1, 3)[3]
    del first
    gc.collect()
    assert memory.sample(40).obs["image"].data_ptr() != place
    del view
    assert place in {memory.sample(40).obs["image"].data_ptr() for _ in range(2)}


def test_an_interrupt_leaves_no_lock_held() -> None:
    """One that comes between taking a lock and the block under it: the thread goes on, and so do others."""
    memory, arrays = fed("camera", device="cpu"), fed("camera")
    assert_same_bits(memory.sample(10), arrays.sample(10))
    batches = memory._batches
    assert isinstance(batches, DeviceBatches)
    for lock in (batches._lock, batches._layouts_lock):
        lock.acquire()
    assert_same_bits(memory.sample(10), arrays.sample(10))
    with ThreadPoolExecutor(1) as other:
        assert_same_bits(other.submit(memory.sample, 10).result(timeout=60), arrays.sample(10))


def test_a_steady_state_allocates_nothing() -> None:
    """The same blocks and the same pinned memory, batch after batch."""
    memory = fed("several large", device="cpu")
    for _ in range(5):
        memory.sample(64)
    pinned = memory.report().staging_bytes
    places = {memory.sample(64).obs["far"].data_ptr() for _ in range(50)}
    assert len(places) <= 2
    assert memory.report().staging_bytes == pinned


def test_store_and_batches_are_on_one_device() -> None:
    """Two different ones are refused."""
    with pytest.raises(ArgumentError, match=r"^store_device \(cpu\) and device \(cuda\) differ"):
        fed("vector", device="cuda", store_device="cpu")


class Watched(DeviceStream):
    """Notes what is pinned; its kernels are loops of C."""

    launches_here = True
    pinned: ClassVar[dict[int, int]] = {}
    most = 0
    refuses = False

    def pin(self, start: int, nbytes: int) -> bool:
        assert start not in self.pinned, "pinned twice"
        if self.refuses:
            return False
        self.pinned[start] = nbytes
        Watched.most = max(self.most, len(self.pinned))
        return True

    def unpin(self, start: int) -> None:
        del self.pinned[start]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    """Let memories use a stream that notes what is pinned."""
    Watched.pinned.clear()
    monkeypatch.setattr(Watched, "most", 0)
    monkeypatch.setattr(device, "DeviceStream", Watched)
    monkeypatch.setattr("holdall.storage.segment.SEGMENT_BYTES", 30_000)
    return Watched


def test_raw_slices_are_read_where_they_lie(watched: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread gathers them; arenas of evicted segments are let go of, and all of them when the memory is closed."""
    monkeypatch.setattr(SliceNamer, "collect", None)
    with fed("frames first", ticks=20, device="cpu") as there, fed("frames first", ticks=20) as arrays:
        streams = [Stream(there_space, spaces.Discrete(3), 2) for there_space in [SPACES["frames first"][0]] * 2]
        for _ in range(60):
            for memory, stream in zip((there, arrays), streams, strict=True):
                steps = stream.ticks(5).arguments()
                memory.extend(**steps, extras={"log_prob": np.zeros((5, 2, 2), np.float32)})
            assert_same_bits(there.sample(40), arrays.sample(40))
            # What the batch before was made of is let go of when the next one has been made.
            assert 0 < len(watched.pinned) <= there.report().segments + 3
        assert watched.most > 3
    assert not watched.pinned


def test_what_a_batch_under_way_reads_stays_pinned(watched: type[Watched]) -> None:
    """Until it is handed out, whatever is evicted in the meantime."""
    there, arrays = fed("camera", device="cpu"), fed("camera")
    stream = Stream(SPACES["camera"][0], spaces.Discrete(3), 2)
    loader = there.loader(50, prefetch=3)
    expected = [arrays.sample(50) for _ in range(4)]
    assert_same_bits(next(loader), expected[0])
    before = set(watched.pinned)
    there.extend(**stream.ticks(150).arguments(), extras={"log_prob": np.zeros((150, 2, 2), np.float32)})
    there.gather([there.next_id - 1])
    assert before & set(watched.pinned)
    for batch in expected[1:]:
        assert_same_bits(next(loader), batch)
    loader.close()
    there.close()
    assert not watched.pinned


def test_memory_that_cannot_be_pinned_goes_through_staging(
    watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on locked memory costs speed, and nothing else."""
    monkeypatch.setattr(watched, "refuses", True)
    there, arrays = fed("camera", device="cpu"), fed("camera")
    assert_same_bits(there.sample(60), arrays.sample(60))
    assert not watched.pinned


def test_a_memory_that_is_forgotten_is_unpinned(watched: type[Watched]) -> None:
    """Nobody has to close it: its pages must not go while a device may read them."""
    memory = fed("camera", device="cpu")
    memory.sample(10)
    assert watched.pinned
    del memory
    gc.collect()
    assert not watched.pinned


@pytest.mark.parametrize("where", ["device", "store_device"])
def test_a_loader_that_has_nothing_to_do_on_the_host_has_the_same_batches(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """They are asked for in the consumer's own call; an error is raised in its batch's turn all the same."""
    monkeypatch.setattr(DeviceStream, "is_asynchronous", True)
    with fed("vector") as arrays, fed("vector", **on(where)) as there, there.loader(30, prefetch=2) as loader:
        for _ in range(5):
            assert_same_bits(next(loader), arrays.sample(30))
        monkeypatch.setattr(DeviceBatches, "fill", None)
        for _ in range(2):
            assert_same_bits(next(loader), arrays.sample(30))
        with pytest.raises(TypeError):
            next(loader)
