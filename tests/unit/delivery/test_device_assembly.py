"""Batches in one call of C, where the host does what the kernels of a device would: the bits of those in arrays."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import NStep, Prioritized, ReplayMemory, Sequence, TransitionIdError
from holdall.batch import Draw, of_ids
from holdall.delivery import SlotDraw, batch_layout, device, device_assembly
from holdall.delivery.batches import Delivery
from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device import DeviceStream
from holdall.delivery.device_assembly import DeviceAssembler
from holdall.delivery.device_batch import DeviceBatches
from holdall.errors import DamageError
from holdall.native import Refusal, SliceNamer, draw_slots
from holdall.storage import segment
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits
from holdall.testing.strategies import box

SPACES: dict[str, tuple[spaces.Space[Any], list[LeafPlan]]] = {
    "frames first": (box((4, 36, 36), "u1"), [LeafPlan(axis=0)]),
    "frames last": (box((36, 36, 4), "u1"), [LeafPlan(axis=2)]),
    "colour frames last": (box((24, 20, 12), "u1"), [LeafPlan(axis=2, step=3)]),
    "camera": (spaces.Dict(image=box((43, 41, 3), "u1"), state=box((7,), "f4")), []),
    "several large": (
        spaces.Dict(far=box((4, 36, 36), "u1"), near=box((50, 50), "u2"), nothing=box((0,), "f4"), z=box((), "?")),
        [LeafPlan(axis=0)],
    ),
    "vector": (box((5,), "f8"), []),
}


class Launching(DeviceStream):
    """A device that is the host, and whose kernels are loops of C."""

    launches_here = True


@pytest.fixture(autouse=True)
def kernels_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let device="cpu" go the way of a GPU with a compiler; the way that others go is closed."""
    monkeypatch.setattr(Delivery, "is_remote", property(lambda self: self.torch_device is not None))
    monkeypatch.setattr(device, "DeviceStream", Launching)
    monkeypatch.setattr(DeviceBatches, "fill", None)


def on(where: str, device: str | None = "cpu") -> dict[str, Any]:
    return {where: device}


EXTRAS = {"log_prob": box((2,), "f4")}


@functools.lru_cache(maxsize=4)
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


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("where", ["device", "store_device"])
@pytest.mark.parametrize("fewest_rows", [7, 1_000])
def test_every_batch_has_the_bits_of_one_in_arrays(
    name: str, where: str, fewest_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent or already there, in one piece or in two, in lanes whose episodes end together or apart."""
    monkeypatch.setattr(device_assembly, "_FEWEST_ROWS", fewest_rows)
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 30_000)
    arrays, there = fed(name), fed(name, **on(where))
    for count in (1, 50, 7, 120, 50):
        batch = there.sample(count)
        assert isinstance(batch.reward, torch.Tensor)
        assert_same_bits(batch, arrays.sample(count))


@pytest.mark.parametrize("name", ["camera", "frames first"])
@pytest.mark.parametrize("where", ["device", "store_device"])
@pytest.mark.parametrize(
    "sampler",
    [lambda: NStep(3, 0.9), lambda: Sequence(6, 3), Prioritized, lambda: Sequence(5, by=Prioritized())],
    ids=["n-step", "sequence", "prioritized", "prioritized sequence"],
)
def test_every_sampler_goes_the_same_way(name: str, sampler: Any, where: str) -> None:
    """Two ids a row, two axes, weights and masks."""
    arrays, there = fed(name, sampler=sampler()), fed(name, sampler=sampler(), **on(where))
    for _ in range(3):
        assert_same_bits(there.sample(40), arrays.sample(40))


@pytest.mark.parametrize("where", ["device", "store_device"])
def test_batches_follow_a_memory_that_grows_and_evicts(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments open, close and go; logs and arenas lie elsewhere; what was drawn before stays right."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 30_000)
    space, plans = SPACES["several large"]
    streams = [Stream(space, spaces.Discrete(3), 2, plans=plans) for _ in range(2)]
    arrays, there = (
        ReplayMemory(space, spaces.Discrete(3), 150, 2, seed=0, **how) for how in (on("device", None), on(where))
    )  # fmt: skip
    kept = []
    for tick in range(300):
        for memory, stream in zip((arrays, there), streams, strict=True):
            memory.add(**stream.tick().arguments())
        if tick % 5 == 4:
            kept.append((there.sample(10), arrays.sample(10)))
            assert_same_bits(*kept[-1])
            del kept[:-8]
    for batch, expected in kept:
        assert_same_bits(batch, expected)


def test_a_loader_has_the_same_batches() -> None:
    """Each is put together when it is drawn."""
    arrays, there = fed("frames first"), fed("frames first", device="cpu")
    with there.loader(30, prefetch=2) as loader:
        for _ in range(5):
            assert_same_bits(next(loader), arrays.sample(30))


def test_every_slice_is_brought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of four and the next one are five frames, not eight; frames that rows share are brought once."""
    brought: list[tuple[int, int]] = []
    assemble = SliceNamer.assemble

    def noted(self: SliceNamer, request: Any) -> Any:
        refused = assemble(self, request)
        brought.append((request.task.field[0].end, request.task.field[0].end_repeat))
        return refused

    monkeypatch.setattr(SliceNamer, "assemble", noted)
    memory = fed("frames first", device="cpu", lanes=1)
    frames = memory.report().fields[0].slice_bytes // (36 * 36)
    ids = np.repeat(np.arange(memory.first_id, memory.next_id), 3)
    memory.gather(ids)
    assert 0 < brought[0][0] <= frames
    assert sum(brought[0]) == 8 * len(ids)


def test_a_steady_state_allocates_nothing() -> None:
    """The same blocks and the same pinned memory, batch after batch."""
    memory = fed("several large", device="cpu")
    for _ in range(5):
        memory.sample(64)
    pinned = memory.report().staging_bytes
    places = {memory.sample(64).obs["far"].data_ptr() for _ in range(50)}
    assert len(places) <= 2
    assert memory.report().staging_bytes == pinned


def test_ids_that_are_not_held_are_refused() -> None:
    """As everywhere, and the next batch is right."""
    arrays, there = fed("camera"), fed("camera", device="cpu")
    for ids in ([there.next_id], [there.first_id - 1], [-1]):
        with pytest.raises(TransitionIdError, match=str(ids[0])):
            there.gather(ids)
    assert_same_bits(there.sample(10), arrays.sample(10))


def test_recipes_of_other_dtypes_are_copied_as_they_are() -> None:
    """A sampler of a user's own may give weights of 64 bits, and rewards of another dtype than those stored."""
    arrays, there = fed("camera"), fed("camera", device="cpu")
    ids = np.arange(there.first_id, there.next_id)[::3]
    for weights in (np.ones(len(ids), np.float32), np.arange(len(ids), dtype=np.float64)):
        for reward in (None, np.arange(len(ids), dtype=np.float64), np.ones(len(ids), np.float16)):
            draw = Draw(ids, weights, reward=reward)  # type: ignore[arg-type]  # what a user's sampler may return
            assert_same_bits(there.follow(draw), arrays.follow(draw))


def test_last_ids_that_are_not_held_are_refused() -> None:
    there = fed("camera", device="cpu")
    ids = np.arange(there.first_id, there.next_id)
    with pytest.raises(TransitionIdError, match=str(there.next_id)):
        there.follow(Draw(ids, np.ones(len(ids), np.float32), ids + 1))


def _cursors(memory: ReplayMemory) -> NDArray[np.uint32]:
    return memory._open().large_segments.cursors[0]


def test_a_place_outside_its_segment_is_damage() -> None:
    """C checks every index; nothing of the batch is returned, and the next one is right."""
    arrays, there = fed("camera"), fed("camera", device="cpu")
    sound = _cursors(there).copy()
    _cursors(there)[:] = 1 << 30
    with pytest.raises(DamageError, match="points outside its segment"):
        there.gather([there.first_id])
    _cursors(there)[:] = sound
    assert_same_bits(there.sample(10), arrays.sample(10))


def test_a_driver_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device, say; the memory is as before."""
    there, arrays = fed("camera", device="cpu"), fed("camera")
    there.sample(10), arrays.sample(10)

    def refuse(self: SliceNamer, request: Any) -> Any:
        request.wrong = 719
        return Refusal.BY_DRIVER

    with monkeypatch.context() as patch:
        patch.setattr(SliceNamer, "assemble", refuse)
        with pytest.raises(CudaProgramError, match="error 719"):
            there.gather([there.first_id])
    assert_same_bits(there.sample(10), arrays.sample(10))


class Recording(Launching):
    """A device that is still reading whatever an event was recorded behind, until somebody waits for that."""

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self.pending: set[int] = set()
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._record)
        self.record_function = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self._events = 0

    def _record(self, event: int, _stream: int) -> int:
        self.pending.add(event)
        return 0

    def new_event(self) -> tuple[Any, int]:
        self._events += 1
        return self._events, self._events

    def has_passed(self, event: Any) -> bool:
        return event not in self.pending

    def synchronize(self, event: Any) -> None:
        self.pending.discard(event)


def streams_of(memory: ReplayMemory) -> Any:
    return memory._batches.stream  # type: ignore[attr-defined]


def cut_off(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_leaves_no_lock_held_and_no_memory_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory of a batch that was cut off is used again only after everything was waited for."""
    monkeypatch.setattr(device, "DeviceStream", Recording)
    monkeypatch.setattr(device_assembly, "_MOST_HEADS", 1)
    there, arrays = fed("camera", device="cpu"), fed("camera")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(batch_layout.BatchPlan, "batch", cut_off)
            with pytest.raises(KeyboardInterrupt):
                there.gather([there.first_id])
        assert streams_of(there).pending  # the event stands behind what was launched
    waited: list[Any] = []
    monkeypatch.setattr(Recording, "synchronize", lambda self, event: waited.append(event))
    assert_same_bits(there.sample(10), arrays.sample(10))
    assert waited
    assert isinstance(there._batches._assembler, DeviceAssembler)  # type: ignore[attr-defined]


def test_a_batch_that_fails_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first slices may be on their way when the next ones turn out to be damaged."""
    monkeypatch.setattr(device, "DeviceStream", Recording)
    there = fed("camera", device="cpu")
    _cursors(there)[-1] = 1 << 30
    with pytest.raises(DamageError, match="points outside its segment"):
        there.gather(np.arange(there.first_id, there.next_id))
    assert streams_of(there).pending


def test_what_launches_read_is_kept_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that are gone, and their blocks; then they go."""
    monkeypatch.setattr(device, "DeviceStream", Recording)
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 30_000)
    there = fed("camera", ticks=60, device="cpu")
    there.sample(10)
    blocks = [weakref.ref(part.block.arena) for part in there._open().large_segments.parts(0) if part.block]
    stream = Stream(SPACES["camera"][0], spaces.Discrete(3), 2, extras={"log_prob": box((2,), "f4")})
    for tick in range(300):
        there.add(**stream.tick().arguments())
        if tick == 290:
            there.sample(10)
    assert any(ref() is not None for ref in blocks)
    for _ in range(100):
        there.add(**stream.tick().arguments())
        there.sample(10)
        streams_of(there).pending.clear()
    assert not any(ref() is not None for ref in blocks)


# ---------------------------------------------------------------- drawn and put together in one call


def test_rows_are_drawn_as_an_adapter_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From NumPy's global generator, which stands where it would otherwise; the first batch goes the general way."""
    there, arrays = fed("camera", ticks=170, device="cpu"), fed("camera", ticks=170)
    slots = arrays.capacity // 2
    for count in (30, 30, 9, 9, 30):
        np.random.seed(count)  # noqa: NPY002  the generator that adapters draw from
        job = there.draw_on("cpu", count, SlotDraw(np.random.get_bit_generator(), slots, slots), ahead=False)  # type: ignore[attr-defined]
        state: Any = np.random.get_state()  # noqa: NPY002
        np.random.seed(count)  # noqa: NPY002
        ids = draw_slots(count, slots, slots, arrays.next_id // 2 - 1, 2)
        if job is None:
            there.follow(of_ids(ids), "cpu")  # which makes the plan
            continue
        assert str(state) == str(np.random.get_state())  # noqa: NPY002
        assert_same_bits(job.receive(), arrays.gather(ids))
    assert job is not None


def test_slots_that_are_not_all_held_are_not_drawn_at_once() -> None:
    there = fed("camera", ticks=30, device="cpu")
    there.follow(of_ids(np.arange(5)), "cpu")
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    for filled, slots in ((31, 100), (100, 100), (29, 100)):
        assert there.draw_on("cpu", 5, SlotDraw(generator, filled, slots), ahead=False) is None
    assert there.draw_on("cpu", 5, SlotDraw(generator, 30, 100), ahead=False) is not None


@pytest.mark.parametrize(
    "held",
    [
        lambda batch: batch.obs["image"],
        lambda batch: batch.obs["image"][3:, 1],
        lambda batch: (batch.obs["state"] * torch.ones(7, requires_grad=True)).sum(),
        lambda batch: batch.reward.numpy(),
        lambda batch: batch.action.untyped_storage(),
        lambda batch: torch.utils.dlpack.to_dlpack(batch.next_obs["state"]),  # type: ignore[attr-defined]
    ],
    ids=["tensor", "view", "graph", "array", "storage", "capsule"],
)
def test_whatever_refers_to_a_batch_keeps_it(held: Any) -> None:
    """When it is gone, the memory is used again."""
    there = fed("camera", device="cpu")
    start = there.sample(40).obs["image"].data_ptr()
    batch = there.sample(40)
    assert batch.obs["image"].data_ptr() == start
    kept = held(batch)
    del batch
    assert all(there.sample(40).obs["image"].data_ptr() != start for _ in range(20))
    del kept
    assert there.sample(40).obs["image"].data_ptr() == start


def test_what_a_user_does_to_a_batch_does_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, gradients and memory that are changed in place are those of one batch alone."""
    there, arrays = fed("camera", device="cpu"), fed("camera")
    for change in (
        lambda batch: batch.reward.unsqueeze_(1),
        lambda batch: batch.obs["state"].requires_grad_(),
        lambda batch: batch.obs["state"].add_(torch.ones(7, requires_grad=True)),
        lambda batch: batch.action.set_(),
        lambda batch: batch.truncated.fill_(True),
    ):
        batch = there.sample(40)
        assert_same_bits(batch, arrays.sample(40))
        assert not batch.obs["state"].requires_grad
        change(batch)  # type: ignore[no-untyped-call]  # torch's own


def test_every_batch_is_one_of_its_own_where_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_storage_Use_Count", None)
    there, arrays = fed("camera", device="cpu"), fed("camera")
    batches = [there.sample(40) for _ in range(6)]
    assert len({batch.obs["image"].data_ptr() for batch in batches}) == len(batches)
    for batch in batches:
        assert_same_bits(batch, arrays.sample(40))
