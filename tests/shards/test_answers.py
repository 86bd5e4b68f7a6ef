"""Segments, stores and answers, without any actor: what goes in comes out, bit for bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.batch import Batch, of_ids
from holdall.cluster import answer
from holdall.cluster.answer import Answer, AnswerPacker, Deliverer, Payload, read_answer
from holdall.cluster.protocol import ShardCounters
from holdall.cluster.shard_data import ShardData, ShardReader
from holdall.delivery import DrawnRows
from holdall.errors import ArgumentError, DamageError
from holdall.native import chosen_kernels
from holdall.sampling import Uniform
from holdall.schema import Schema, schema_words
from holdall.storage import batch_source
from holdall.storage.blocks import Codec, Dictionary, Method, Transform
from holdall.storage.codec_choice import COST_CAPS, choose
from holdall.storage.sealed_segment import Encoder, SealedSegment, pack_segment, sliced_leaves, unpack_segment
from holdall.storage.store import Store
from holdall.storage.ticks import Kernels, Tick
from holdall.storage.tiers import Budget
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.strategies import streams
from holdall.testing.streams import StreamStep

Ids = NDArray[np.int64]
NOWHERE = ShardCounters(0, 0, 0, 0, 0, 0, 0, 0.0)
FRAMES = spaces.Box(0, 255, (4, 24, 24), np.uint8)


class Desk:
    """A writer and a shard's store in one process."""

    def __init__(
        self, stream: Stream, capacity: int, ticks: int, kernels: Kernels | None = None, decoded_bytes: int = 0
    ) -> None:
        self.kernels = kernels or chosen_kernels()
        self.stream = stream
        self.schema = Schema.of(stream.observation_space, stream.action_space, stream.extras, stream.num_envs)
        self.encoder = Encoder(self.schema, stream.num_envs, ticks, self.kernels)
        one_lane, rows = replace(self.schema, num_envs=1), capacity * stream.num_envs
        self.store = Store(
            one_lane,
            rows,
            self.kernels,
            threading.Lock(),
            Budget(cost_cap=COST_CAPS["memory"], most_threads=1),
            large=sliced_leaves(one_lane),
        )
        self.reader = ShardReader(one_lane, sliced_leaves(one_lane), self.kernels, decoded_bytes)
        self.packer = AnswerPacker()
        self.oracle = OracleMemory(rows, stream.num_envs)
        self.codecs: dict[int, Codec] = {}
        self.wire_bytes = 0

    def tick(self) -> None:
        step = self.stream.tick()
        self.oracle.add(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated, step.extras)
        if self.encoder.is_full:
            self.send()
        self.encoder.add(self.flat(step))

    def flat(self, step: StreamStep) -> Tick:
        leading = (self.stream.num_envs,)
        return Tick(
            self.schema.observation.flatten(step.obs, leading, "obs"),
            self.schema.action.flatten(step.action, leading, "action"),
            step.reward,
            self.schema.observation.flatten(step.next_obs, leading, "next_obs"),
            step.terminated,
            step.truncated,
            self.schema.extras.flatten(step.extras, leading, "extras"),
            None,
        )

    def packed(self) -> bytes:
        return pack_segment(self.encoder.close(self.codecs), self.kernels.coder)

    def send(self) -> None:
        if self.encoder.rows:
            payload = self.packed()
            self.wire_bytes += len(payload)
            self.store.adopt(self.received(payload))

    @property
    def dictionaries(self) -> dict[str, Dictionary]:
        found = [codec.dictionary for codec in self.codecs.values() if codec.dictionary is not None]
        return {each.name: each for each in found}

    def received(self, payload: bytes) -> SealedSegment:
        """Read a segment; that of a local memory may name dictionaries."""
        return unpack_segment(payload, self.schema, self.dictionaries, self.kernels.coder)

    def answer(self, ids: Ids, *, is_near: bool = False) -> Payload:
        """Make the answer of a shard: to another machine the rows go from the oldest to the newest."""
        order = None if is_near else np.argsort(ids, kind="stable")
        draw = of_ids(ids if order is None else ids[order])
        found = DrawnRows(self.reader.read(self.store.read(draw.ids)), None, None)
        return self.packer.pack(Answer(NOWHERE, draw, np.ones(len(ids)), found, order), is_near=is_near)

    def gather(self, ids: Ids, *, is_near: bool = False) -> Batch:
        answer, all_of_them = read_answer(self.answer(ids, is_near=is_near)), np.arange(len(ids))
        deliverer = Deliverer(self.schema, self.kernels, None, sliced_leaves(self.schema))
        where = all_of_them if answer.order is None else all_of_them[answer.order]
        return deliverer.batch([answer], [where], [0], np.ones(len(ids), np.float32))


@pytest.fixture(params=[0.0, 0.9, 1e9], ids=["plain", "as it pays", "compressed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Have arrays sent as they are, or compressed, whatever pays."""
    monkeypatch.setattr(AnswerPacker, "pays_up_to", request.param)
    share: float = request.param
    return share


@pytest.fixture
def kernels() -> Kernels:
    return chosen_kernels()


@settings(max_examples=40)
@given(
    stream=streams(),
    share=st.sampled_from([0.0, 0.25, 1e9]),
    is_near=st.booleans(),
    large_bytes=st.sampled_from([0, 1 << 15]),
    decoded_bytes=st.sampled_from([0, 20_000, 1 << 30]),
    ticks=st.integers(1, 40),
    capacity=st.integers(1, 90),
    block=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_was_sent_is_what_is_found(
    stream: Stream, share: float, is_near: bool, large_bytes: int, decoded_bytes: int, ticks: int, capacity: int,
    block: int, seed: int,
) -> None:  # fmt: skip
    desk = Desk(stream, capacity, block, decoded_bytes=decoded_bytes)
    generator = np.random.default_rng(seed)
    for _ in range(ticks):
        desk.tick()
        if generator.random() < 0.1:
            desk.send()
    desk.send()
    assert (desk.store.first_tick, desk.store.next_tick) == (desk.oracle.first_id, desk.oracle.next_id)
    ids = generator.choice(desk.oracle.ids, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerPacker, "pays_up_to", share)
        patch.setattr(answer, "_LARGE_BYTES", large_bytes)
        for _ in range(2):  # what was decoded for the first batch is there for the second
            assert_same_bits(desk.gather(ids, is_near=is_near), desk.oracle.gather(ids))


def test_windows_codecs_and_dictionaries_may_change_between_segments(kernels: Kernels, way: float) -> None:
    turning = LeafPlan(axis=0, content="table", later=LeafPlan(), later_from=150)
    desk = Desk(Stream(FRAMES, spaces.Discrete(3), 2, plans=[turning], mishaps=Mishaps(ends=0.1)), 400, 32, kernels)
    for count in range(300):
        desk.tick()
        if count == 100:
            field = desk.encoder.fields[0]
            slices = np.random.default_rng(0).integers(0, 3, (300, field.window.slice_bytes)).astype(np.uint8)
            desk.codecs[0] = choose(kernels.coder, field.leaf, field.window, slices, 1e9, 1)
    desk.send()
    ids = desk.oracle.ids
    assert_same_bits(desk.gather(ids), desk.oracle.gather(ids))


def test_decoded_slices_are_kept_within_a_limit_and_go_with_their_segment(kernels: Kernels) -> None:
    stream, room = Stream(FRAMES, spaces.Discrete(2), 1, plans=[LeafPlan()], seed=1), 40 * 4 * 24 * 24
    desk = Desk(stream, 60, 10, kernels, room)
    kept = desk.reader._kept

    def draw() -> None:
        ids = np.arange(desk.store.first_tick, desk.store.next_tick)
        assert_same_bits(desk.gather(ids, is_near=True), desk.oracle.gather(ids))

    for ticks in (30, 30, 60, 60):
        for _ in range(ticks):
            desk.tick()
        desk.send()
        draw()
        gc.collect()  # segments that left
        assert kept._room == room - sum(slices.nbytes for slices in kept._slices.values()) >= 0
        assert kept._slices


def test_what_compresses_well_is_not_kept_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_source, "_KEPT_FROM", 1.2)  # as if all of it did
    desk = Desk(Stream(FRAMES, spaces.Discrete(2), 1, plans=[LeafPlan()]), 60, 10, None, 1 << 30)
    for _ in range(40):
        desk.tick()
    desk.send()
    assert_same_bits(desk.gather(desk.oracle.ids), desk.oracle.gather(desk.oracle.ids))
    assert not desk.reader._kept._slices


def test_palettes_belong_to_their_segments(kernels: Kernels, way: float) -> None:
    space = spaces.Box(-1, 1, (80,), np.float64)
    desk = Desk(Stream(space, spaces.Discrete(3), plans=[LeafPlan(content="constant")]), 40, 8, kernels)
    codec = Codec(Method.ZSTD, 1, Transform(640, word_bytes=8), None, 2)
    desk.codecs[0] = codec
    generator = np.random.default_rng(0)
    for _ in range(30):  # every block has words of its own
        words = generator.random(4)
        for _ in range(8):
            obs, following = (generator.choice(words, (1, 80)) for _ in range(2))
            no, reward = np.zeros(1, np.bool_), np.zeros(1, np.float32)
            action = np.zeros(1, np.int64)
            desk.oracle.add(obs, action, reward, following, no, no)
            desk.encoder.add(Tick([obs], [action], reward, [following], no, no, [], None))
        desk.send()
    ids = desk.oracle.ids
    assert_same_bits(desk.gather(ids), desk.oracle.gather(ids))


def test_only_slices_that_are_new_are_sent() -> None:
    stream = Stream(FRAMES, spaces.Discrete(3), plans=[LeafPlan(axis=0)], mishaps=Mishaps(ends=0))
    desk = Desk(stream, 2_000, 128)
    for _ in range(1_024):
        desk.tick()
    desk.send()
    a_frame = FRAMES.shape[1] * FRAMES.shape[2]
    assert desk.wire_bytes < 1.2 * 1_024 * a_frame  # of 8 frames in a plain transition


def flipped(payload: bytes) -> Iterator[bytes]:
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(payload), 200).tolist():
        yield payload[:place] + bytes([payload[place] ^ (1 << generator.integers(8))]) + payload[place + 1 :]


def test_a_segment_that_was_damaged_is_refused_whole() -> None:
    desk = Desk(Stream(FRAMES, spaces.Discrete(3), plans=[LeafPlan(axis=0)]), 100, 16)
    for _ in range(16):
        desk.tick()
    payload = desk.packed()
    for damaged in (payload[:-1], payload + b"x", b"", *flipped(payload)):
        with pytest.raises(DamageError):
            desk.received(damaged)


@pytest.mark.usefixtures("way")
def test_an_answer_that_was_damaged_is_refused_whole() -> None:
    desk = Desk(Stream(FRAMES, spaces.Discrete(3), plans=[LeafPlan(axis=0)]), 100, 16)
    for _ in range(40):
        desk.tick()
    desk.send()
    rows = np.array([3, 39, 3, 17])
    for _ in range(2):  # what did not pay at first is not tried again so soon
        payload = desk.answer(rows)
        assert isinstance(payload, bytes)
        found = read_answer(payload)
        assert found.order is not None
        assert rows[found.order].tolist() == found.draw.ids.tolist() == sorted(rows.tolist())
        for damaged in (payload[:-1], payload + b"x", b"", *flipped(payload)):
            with pytest.raises(DamageError):
                read_answer(damaged)


def test_an_answer_without_rows_that_it_should_have_gives_no_batch() -> None:
    """Whoever made it: its checksum is right."""
    desk = Desk(Stream(FRAMES, spaces.Discrete(3), plans=[LeafPlan(axis=0)]), 100, 16)
    for _ in range(40):
        desk.tick()
    desk.send()
    ids = np.arange(30)
    found = read_answer(desk.answer(ids))
    deliverer = Deliverer(desk.schema, desk.kernels, None, sliced_leaves(desk.schema))
    lacking = found._replace(found=DrawnRows(found.found.rows._replace(small={}), None, None))
    with pytest.raises(DamageError):
        deliverer.batch([lacking], [ids], [0], np.ones(30, np.float32))


def test_neighbours_are_sent_once_however_many_rows_have_them() -> None:
    stream = Stream(FRAMES, spaces.Discrete(3), plans=[LeafPlan(axis=0)], mishaps=Mishaps(ends=0))
    desk = Desk(stream, 2_000, 128)
    for _ in range(600):
        desk.tick()
    desk.send()
    ids = np.random.default_rng(0).permutation(np.arange(100, 356))
    payload = desk.answer(ids)
    assert isinstance(payload, bytes)
    a_frame = FRAMES.shape[1] * FRAMES.shape[2]
    assert len(payload) < 1.2 * 260 * a_frame  # of 8 frames in a plain transition


def test_a_segment_of_another_reward_dtype_is_refused_and_nothing_changes() -> None:
    desk = Desk(Stream(FRAMES, spaces.Discrete(3)), 100, 16)
    other = Desk(Stream(FRAMES, spaces.Discrete(3), reward_dtype=np.float64), 100, 16)
    desk.tick()
    other.tick()
    desk.send()
    with pytest.raises(ArgumentError, match="reward has dtype float64"):
        desk.store.adopt(desk.received(other.packed()))
    assert desk.store.next_tick == 1


def test_a_segment_that_names_a_dictionary_is_refused() -> None:
    desk = Desk(Stream(FRAMES, spaces.Discrete(3), plans=[LeafPlan(content="table")]), 100, 16)
    slice_bytes = desk.encoder.fields[0].window.slice_bytes
    desk.codecs[0] = Codec(Method.ZSTD, 3, Transform(slice_bytes), Dictionary(bytes(range(256)) * 8))
    for _ in range(16):
        desk.tick()
    shard = ShardData(schema_words(desk.schema), 100, Uniform(), np.random.default_rng(0), threading.Lock())
    with pytest.raises(DamageError):
        shard.unpacked(desk.packed())
