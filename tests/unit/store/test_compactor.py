"""Compactor: blocks in, compressed forms out."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from holdall._native import Block, Coded, Raw, decode, encode
from holdall.codec.codec import Codec, Method
from holdall.store.compactor import Compactor
from holdall.store.tuning import Tuning

SLICES = np.arange(64, dtype=np.uint8).repeat(32).reshape(32, 64)


def new_block() -> Block:
    return Block(64, 32, SLICES)


def compress(block: Block, is_behind: bool) -> Coded:
    coded = encode(block, Codec(64, Method.LZ4, 0 if is_behind else 7))
    assert coded is not None
    return coded


def test_submitted_blocks_are_compressed_and_read_as_before() -> None:
    compactor = Compactor(compress, Tuning(), max_queued_bytes=10**6)
    blocks = [new_block() for _ in range(5)]
    compactor.submit(blocks)
    compactor.wait_idle()
    assert compactor.backlog == 0
    for block in blocks:
        assert isinstance(block.form, Coded)
        assert decode(block.form, 0, 32).tobytes() == SLICES.tobytes()
    compactor.close()


def test_a_block_is_compressed_once() -> None:
    seen: list[Block] = []

    def count(block: Block, is_behind: bool) -> Coded:
        seen.append(block)
        return compress(block, is_behind)

    compactor = Compactor(count, Tuning(), max_queued_bytes=10**6)
    block = new_block()
    for _ in range(3):
        compactor.submit([block, block])
    compactor.wait_idle()
    compactor.submit([block])
    compactor.wait_idle()
    assert len(seen) == 1
    compactor.close()


def test_a_block_that_cannot_be_compressed_keeps_its_form_and_is_not_tried_again() -> None:
    tries: list[Block] = []

    def fail(block: Block, is_behind: bool) -> Coded:
        tries.append(block)
        raise MemoryError("no room")

    compactor = Compactor(fail, Tuning(), max_queued_bytes=10**6)
    block = new_block()
    for _ in range(2):
        compactor.submit([block])
        compactor.wait_idle()
    assert isinstance(block.form, Raw)
    assert compactor.failure == "MemoryError: no room"
    assert len(tries) == 1
    compactor.forget([])
    compactor.submit([block])
    compactor.wait_idle()
    assert len(tries) == 2
    compactor.close()


@pytest.mark.timeout(20)
def test_waiting_for_room_ends_when_the_queue_is_short_and_when_it_is_closed() -> None:
    may_go_on = threading.Event()
    has_begun = threading.Event()

    def wait(block: Block, is_behind: bool) -> Coded:
        has_begun.set()
        may_go_on.wait()
        return compress(block, is_behind)

    compactor = Compactor(wait, Tuning(poll_s=0.01), max_queued_bytes=2048)
    compactor.submit([new_block() for _ in range(3)])
    has_begun.wait()
    is_over = threading.Event()

    def wait_for_room() -> None:
        compactor.wait_for_room()
        is_over.set()

    waiter = threading.Thread(target=wait_for_room)
    waiter.start()
    assert not is_over.is_set()
    may_go_on.set()
    waiter.join()
    assert is_over.is_set()
    compactor.close()
    compactor.wait_for_room()
    compactor.submit([new_block()])
    assert compactor.backlog == 0
