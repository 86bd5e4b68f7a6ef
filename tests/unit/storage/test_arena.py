"""Arenas are used again only when nothing looks into them any more."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdall.schema import Bytes
from holdall.storage.blocks import address, release_tail, reserve
from holdall.storage.segment import ArenaPool

SIZE = 3 * mmap.PAGESIZE
LOOKS: dict[str, Callable[[Any], Any]] = {
    "the arena itself": lambda arena: arena,
    "a slice": lambda arena: arena[10:20],
    "an empty slice": lambda arena: arena[5:5],
    "a slice of a slice": lambda arena: arena[100:][7:9],
    "rows": lambda arena: arena.reshape(-1, 64),
    "words": lambda arena: arena.view(np.uint32),
    "one row of words": lambda arena: arena.view(np.float64).reshape(-1, 8)[3],
    "every other byte": lambda arena: arena[::-2],
    "a memoryview": memoryview,
    "an array over a memoryview": lambda arena: np.frombuffer(memoryview(arena), np.uint16),
    "a ctypes buffer": ctypes.c_char.from_buffer,
    "a slice in a tuple": lambda arena: ((arena[1:2],),),
    "a view of its base": lambda arena: arena.base[3:4],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_an_arena_that_is_looked_into_is_not_handed_out(look: Callable[[Bytes], Any]) -> None:
    """However it is looked into; when nobody does any more, it is."""
    pool = ArenaPool()
    arena = pool.take(SIZE)
    arena[:] = 3
    start = address(arena)
    seen = look(arena)
    pool.give_up(arena)
    del arena
    other = pool.take(SIZE)
    assert address(other) != start
    del seen
    again = pool.take(SIZE)
    assert address(again) == start
    assert not np.shares_memory(again, other)


def test_an_arena_given_up_twice_has_one_owner() -> None:
    """Evicted while it waits to be sealed, then sealed: it comes in twice."""
    pool = ArenaPool()
    arena = reserve(SIZE)
    pool.give_up(arena)
    pool.give_up(arena)
    del arena
    taken = [pool.take(SIZE) for _ in range(4)]
    assert len({address(each) for each in taken}) == 4


@pytest.mark.parametrize("borrowed", [0, 1, 2])
def test_no_count_of_references_decides(borrowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that counts fewer of them, as 3.14 does for arguments, hands out no arena that is still read."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) - borrowed)
    pool = ArenaPool()
    arena = pool.take(SIZE)
    seen, start = arena[3:9], address(arena)
    pool.give_up(arena)
    del arena
    assert address(pool.take(SIZE)) != start
    del seen
    assert address(pool.take(SIZE)) == start


def test_who_looks_at_spare_arenas_keeps_them_from_being_used() -> None:
    """A watch may ask for them at any time."""
    pool = ArenaPool()
    pool.give_up(reserve(SIZE))
    (spare,) = pool.spare
    start = address(spare)
    assert address(pool.take(SIZE)) != start
    assert [address(each) for each in pool.spare] == [start]
    del spare
    assert address(pool.take(SIZE)) == start
    assert pool.spare == []


def test_an_arena_fits_exactly() -> None:
    """One of another size is not cut or stretched."""
    pool = ArenaPool()
    pool.give_up(reserve(2 * SIZE))
    assert pool.take(SIZE).nbytes == SIZE
    assert pool.take(2 * SIZE).nbytes == 2 * SIZE


def test_a_pool_keeps_no_more_than_it_was_told() -> None:
    """The newest ones; empty ones are not worth keeping."""
    pool = ArenaPool(most=2)
    for count in (1, 2, 3, 0):
        pool.give_up(reserve(count * SIZE))
    assert sum(spare.nbytes for spare in pool.spare) == 5 * SIZE


@pytest.mark.parametrize("used", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, SIZE - 1, SIZE])
def test_what_is_in_use_survives_the_release_of_the_rest(used: int) -> None:
    """Pages behind the last byte in use are given back; they can be written to again."""
    arena = reserve(SIZE)
    arena[:] = 7
    release_tail(arena, used)
    assert (arena[:used] == 7).all()
    if hasattr(mmap, "MADV_DONTNEED"):
        first_free = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        assert not arena[first_free:].any()
    arena[:] = 9
    assert (arena == 9).all()


def test_memory_that_was_not_reserved_is_left_alone() -> None:
    """An array of any other origin has no pages of its own."""
    array = np.full(SIZE, 5, np.uint8)
    release_tail(array, 1)
    assert (array == 5).all()
