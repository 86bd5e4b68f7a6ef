"""Pairs of differences: how the tables are trained that camera images are coded by, and that code itself with NumPy.

In:  differences of images, a row each.  Out: tables; units that pairs.c reads, and the differences of such units.
Invariant: all differences come back as they were: those that have no symbol of their own are marked, and follow.

pairs.c says what a unit looks like. Every symbol has a case, which decides by which table it is coded: what stands
around a pair, the kind of plane that a block is in, or what the first plane has in the place of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage.blocks import Transform, reserve

Numbers = NDArray[np.int64]
Short = NDArray[np.int16]
"""Cases and symbols, of which there are many."""

_STATE_BITS, _CHAINS, _BLOCK = 9, 4, 16
_STATES = 1 << _STATE_BITS
_SPREAD = _STATES // 2 + _STATES // 8 + 3
_PAIR_SYMBOLS, _VALUE_SYMBOLS, _ANY_VALUE, _MARKED, _UNKNOWN = 16, 32, 31, 3, 255
_KINDS, _AROUND, _MOST_TABLES = 3, 4096, 127
_BLOCK_CASES = _KINDS * _AROUND
_PAIR_CASES, _VALUE_CASES = _BLOCK_CASES + _KINDS, _KINDS * _VALUE_SYMBOLS
"""The numbers of pairs.c: cases of pairs come first, then those of blocks, then those of values."""
_SMALLEST = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 14, 18, 26, 34, 50, 66, 98, 130])
_LEAST_OF = np.column_stack([_SMALLEST[:-1], 1 - _SMALLEST[1:]]).reshape(-1)
_EXTRA_BITS = np.array([0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]).repeat(2)
_LEAST_OF[_ANY_VALUE], _EXTRA_BITS[_ANY_VALUE] = 0, 8
"""By symbol: the least value, and how many bits are added to it."""
_VALUES = np.arange(256).astype(np.uint8).view(np.int8).astype(np.int64)
_SYMBOL_OF = (2 * np.searchsorted(_SMALLEST, np.abs(_VALUES), side="right") - 2 + (_VALUES < 0)).astype(np.int16)
_CLASS_OF = np.full(256, _MARKED, np.int16)
_CLASS_OF[[0, 1, 255]] = 0, 1, 2

_PAIR_TABLES, _VALUE_TABLES, _ROUNDS = 48, 16, 12
"""Tables that are trained, and how often cases are shared out to them."""
_TRAINED_SLICES, _AT_ONCE = 64, 8
"""Slices that tables are trained on, and that are looked at together."""
_RARE = 0.35
"""States; a value that is due fewer has none, and is coded as any value."""


# ---------------------------------------------------------------- symbols


class _PairForm:
    """Where pairs stand, as pairs.c says."""

    def __init__(self, transform: Transform) -> None:
        half = max(transform.columns // 2, 1)
        self.planes, self.plane = transform.planes, transform.rows * transform.columns
        self.blocks = -(-self.plane // (2 * _BLOCK))
        self.above = (_BLOCK + half) // half * half
        pixels = np.arange(self.blocks * 2 * _BLOCK).reshape(-1, _BLOCK, 2)
        self.order = pixels.transpose(0, 2, 1).reshape(-1)  # of values: in each block, those that stand first in a pair

    def around(self, pairs: NDArray[Any], kind: int, in_first: Any) -> NDArray[Any]:
        """Return the cases of pairs that follow some others, `above` pairs and one more."""
        count = pairs.shape[1] - self.above - 1
        left, above, right = (pairs[:, at : at + count] for at in range(3))
        cases: NDArray[Any] = left >> 2 | above << 2 | (right & 3) << 6 | in_first << 8 | kind << 12
        return cases


class _Symbols(NamedTuple):
    """Some symbols of each of several slices, in the order of decoding: a row of every array each."""

    case: Short  # -1: it is no symbol, but a bit
    symbol: Short
    is_there: NDArray[np.bool_]
    value: Bytes | None = None


def _symbols_of(rows: Bytes, form: _PairForm) -> Iterator[_Symbols]:
    """Yield the symbols of slices, piece by piece."""
    planes = np.zeros((len(rows), form.planes, form.blocks * 2 * _BLOCK), np.uint8)
    planes[:, :, : form.plane] = rows.reshape(len(rows), form.planes, form.plane)
    first, in_first = planes[:, 0].copy(), np.zeros((len(rows), 1), np.int16)
    for number in range(form.planes):
        kind, plane = min(number, _KINDS - 1), planes[:, number]
        if number:
            is_less = np.count_nonzero(plane - first, axis=1) < np.count_nonzero(plane, axis=1)
            plane[is_less] -= first[is_less]
            bit = is_less[:, None].astype(np.int16)
            yield _Symbols(np.full_like(bit, -1), bit, np.ones(bit.shape, np.bool_))
        blocks = plane.reshape(len(rows), form.blocks, -1).any(axis=2)
        fours = np.pad(blocks, ((0, 0), (0, -form.blocks % 4))).reshape(len(rows), -1, 4) @ (1 << np.arange(4))
        case = np.full(fours.shape, _BLOCK_CASES + kind, np.int16)
        yield _Symbols(case, fours.astype(np.int16), np.ones(fours.shape, np.bool_))
        classes = _CLASS_OF[plane]
        pairs = classes[:, ::2] | classes[:, 1::2] << 2
        cases = form.around(np.pad(pairs, ((0, 0), (form.above + 1, 0))), kind, in_first)
        yield _Symbols(cases, pairs, blocks.repeat(_BLOCK, axis=1))
        value, is_marked = plane[:, form.order], classes[:, form.order] == _MARKED
        known = first[:, form.order] if number else np.full_like(value, _UNKNOWN)
        case = _SYMBOL_OF[known] + np.int16(_PAIR_CASES + kind * _VALUE_SYMBOLS)
        yield _Symbols(case, _SYMBOL_OF[value], is_marked, value)
        if number == 0:
            in_first = pairs


# ---------------------------------------------------------------- training


def train_pairs(rows: Bytes, transform: Transform) -> bytes:
    """Train tables on differences of slices; return them as pairs.c reads them."""
    few = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _TRAINED_SLICES)).astype(np.int64))]
    form = _PairForm(transform)
    # In memory that goes back to the system: a heap would keep megabytes.
    counts = reserve(4 * (_PAIR_CASES + _VALUE_CASES) * _VALUE_SYMBOLS).view(np.int32)
    for start in range(0, len(few), _AT_ONCE):
        for case, symbol, is_there, _ in _symbols_of(few[start : start + _AT_ONCE], form):
            seen = is_there & (case >= 0)
            np.add.at(counts, case[seen].astype(np.int32) * _VALUE_SYMBOLS + symbol[seen], 1)
    by_case = counts.reshape(-1, _VALUE_SYMBOLS)
    pairs = _share_out(*_turned_pairs(by_case[:_BLOCK_CASES]), _PAIR_TABLES, _BLOCK_CASES)
    values = _share_out(*_turned_values(by_case[_PAIR_CASES:]), _VALUE_TABLES, _VALUE_CASES)
    blocks = by_case[_BLOCK_CASES:_PAIR_CASES, :_PAIR_SYMBOLS]
    of_cases = np.concatenate([pairs[0], len(pairs[1]) + np.arange(_KINDS), values[0]])
    every_one, any_one = np.full(_PAIR_SYMBOLS, fill_value=True), np.arange(_VALUE_SYMBOLS) == _ANY_VALUE
    shares = [_shares(row, every_one) for row in (*pairs[1], *blocks)] + [_shares(row, any_one) for row in values[1]]
    head = bytes([len(pairs[1]) + _KINDS, len(values[1])]) + of_cases.astype(np.uint8).tobytes()
    return head + b"".join(share.tobytes() for share in shares)


def _turned_pairs(counts: NDArray[Any]) -> tuple[Numbers, NDArray[Any]]:
    """Count images as they are, mirrored and with light and dark exchanged: scenes turn, and tables stay.

    Returns:
        Cases that were seen, and how often each symbol came with them.
    """
    case, symbol = np.nonzero(counts)
    kind, count = case // _AROUND, counts[case, symbol]
    around, pair = (number[:, None] >> 2 * np.arange(size) & 3 for number, size in ((case, 6), (symbol, 2)))
    other = np.array([0, 2, 1, 3])  # a class with the other sign
    turned = [(around, pair), (around[:, [3, 2, 1, 0, 5, 4]], pair[:, ::-1])]
    turned += [(other[a], other[b]) for a, b in turned]
    cases = np.concatenate([kind * _AROUND + a @ (1 << 2 * np.arange(6)) for a, _ in turned])
    symbols = np.concatenate([b @ (1 << 2 * np.arange(2)) for _, b in turned])
    return _by_case(cases, symbols, np.tile(count, 4), _PAIR_SYMBOLS)


def _turned_values(counts: NDArray[Any]) -> tuple[Numbers, NDArray[Any]]:
    """Do the same for values."""
    case, symbol = np.nonzero(counts)
    other = np.arange(_VALUE_SYMBOLS) ^ 1
    other[:2] = 0, 1
    kind, known = np.divmod(case, _VALUE_SYMBOLS)
    cases = np.concatenate([case, np.where(kind > 0, kind * _VALUE_SYMBOLS + other[known], case)])
    symbols = np.concatenate([symbol, other[symbol]])
    symbols[symbols == _ANY_VALUE - 1] = _ANY_VALUE
    return _by_case(cases, symbols, np.tile(counts[case, symbol], 2), _VALUE_SYMBOLS)


def _by_case(cases: Numbers, symbols: Numbers, counts: NDArray[Any], size: int) -> tuple[Numbers, NDArray[Any]]:
    seen, row = np.unique(cases, return_inverse=True)
    return seen, np.bincount(row * size + symbols, counts, len(seen) * size).reshape(-1, size)


def _share_out(seen: Numbers, rows: NDArray[Any], most: int, cases: int) -> tuple[Numbers, NDArray[Any]]:
    """Put cases whose symbols are alike together; return the number of each one's table, and the tables' counts."""
    overall = rows.sum(axis=0) + 0.5
    overall /= overall.sum()
    if not len(rows):
        return np.zeros(cases, np.int64), overall[None]
    alone = (rows + overall) / (rows.sum(axis=1, keepdims=True) + 1)
    least = -(rows * np.log2(alone)).sum(axis=1)  # the bits that a case takes by a table of its own
    tables = alone[np.argmax(rows.sum(axis=1))][None]
    bits = _bits_by(tables, rows)[0]
    while len(tables) < min(most, len(rows)):  # the next one is for what fits worst
        tables = np.concatenate([tables, alone[np.argmax(bits - least)][None]])
        bits = np.minimum(bits, _bits_by(tables[-1:], rows)[0])
    for _ in range(_ROUNDS):
        nearest = np.argmin(_bits_by(tables, rows), axis=0)
        gathered = np.tile(overall / 2, (len(tables), 1))
        np.add.at(gathered, nearest, rows)
        tables = gathered / gathered.sum(axis=1, keepdims=True)
    numbers = np.full(cases, np.argmin(_bits_by(tables, overall[None])))
    numbers[seen] = nearest
    return numbers, gathered


def _bits_by(tables: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Return the bits that each case takes by each table: without BLAS, which would start threads and keep memory."""
    bits: NDArray[Any] = np.einsum("ts,cs->tc", -np.log2(tables), rows)
    return bits


def _shares(counts: NDArray[Any], must_be: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Share the states of a table out to its symbols, so that the fewest bits are lost."""
    due = (counts + 1e-3) / (counts + 1e-3).sum() * _STATES
    shares = np.where(must_be | (due >= _RARE), np.maximum(np.rint(due), 1), 0)
    while (missing := _STATES - shares.sum()) != 0:
        after = shares + np.sign(missing)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where((shares > 0) & (after > 0), due * np.log2(after / shares), -np.inf)
        at = np.argmax(gain)
        shares[at] = after[at]
    return shares.astype("<u2")


# ---------------------------------------------------------------- tables


class PairTables:
    """Tables that were trained, ready to code by."""

    def __init__(self, trained: bytes) -> None:
        content = np.frombuffer(trained, np.uint8).astype(np.int64)
        pairs, values = content[:2] if len(content) > 1 else (0, 0)
        of_pairs, of_values, shares = np.split(content[2:], [_PAIR_CASES, _PAIR_CASES + _VALUE_CASES])
        expected = 2 * (_PAIR_SYMBOLS * pairs + _VALUE_SYMBOLS * values)
        fits = len(shares) == expected and len(of_values) == _VALUE_CASES and pairs + values <= _MOST_TABLES
        if not fits or of_pairs.max() >= pairs or of_values.max() >= values:
            raise DamageError(f"tables of pairs of {len(trained)} bytes are damaged; nothing is read with them")
        share = np.zeros((pairs + values, _VALUE_SYMBOLS), np.int64)
        words = shares[::2] | shares[1::2] << 8
        share[:pairs, :_PAIR_SYMBOLS] = words[: pairs * _PAIR_SYMBOLS].reshape(pairs, -1)
        share[pairs:] = words[pairs * _PAIR_SYMBOLS :].reshape(values, -1)
        is_whole = (share.sum(axis=1) == _STATES).all() and share[:pairs, :_PAIR_SYMBOLS].all()
        if not is_whole or not share[pairs:, _ANY_VALUE].all():
            raise DamageError("tables of pairs have other shares than tables have; nothing is read with them")
        self.of_case = np.concatenate([of_pairs, pairs + of_values])
        self.share, self.first = share, np.cumsum(share, axis=1) - share
        self.is_value = np.arange(pairs + values) >= pairs
        self._make()

    def _make(self) -> None:
        count = len(self.share)
        places = np.arange(_STATES) * _SPREAD % _STATES
        self.symbol = np.empty((count, _STATES), np.int64)
        self.state_of = np.empty((count, _STATES), np.int64)
        counted = np.empty((count, _STATES), np.int64)
        for table in range(count):
            spread = np.repeat(np.arange(_VALUE_SYMBOLS), self.share[table])
            self.symbol[table, places] = spread
            self.state_of[table] = np.argsort(self.symbol[table], kind="stable")
            counted[table, self.state_of[table]] = np.arange(_STATES) - self.first[table, spread]
        own = np.take_along_axis(self.share, self.symbol, axis=1) + counted
        self.bits = _STATE_BITS + 1 - _length(own)
        self.base = (own << self.bits) - _STATES


def _length(numbers: Numbers) -> Numbers:
    """Return how many bits numbers have."""
    return np.frexp(numbers)[1].astype(np.int64)


# ---------------------------------------------------------------- encoding


def encode_pairs(rows: Bytes, transform: Transform, tables: PairTables) -> list[bytes]:
    """Code differences of slices, a unit each."""
    form, units = _PairForm(transform), list[bytes]()
    for start in range(0, len(rows), _AT_ONCE):
        few = rows[start : start + _AT_ONCE]
        pieces = [(*piece[:3], *_turns(piece)) for piece in _symbols_of(few, form)]
        units += _encode([np.concatenate(arrays, axis=1) for arrays in zip(*pieces, strict=True)], tables)
    return units


def _turns(piece: _Symbols) -> tuple[Numbers, NDArray[Any]]:
    """Return the state that each symbol is coded with, and the whole value or bit."""
    if piece.value is not None:
        return (np.cumsum(piece.is_there, axis=1) - 1) % _CHAINS, piece.value
    return np.broadcast_to(np.arange(piece.case.shape[1]) % _CHAINS, piece.case.shape), piece.symbol


def _encode(pieces: list[NDArray[Any]], tables: PairTables) -> list[bytes]:
    row, column = np.nonzero(pieces[2])
    case, symbol, _, turn, rest = (array[row, column].astype(np.int64) for array in pieces)
    table = tables.of_case[case]
    is_value = tables.is_value[table] & (case >= 0)
    is_any = is_value & ((symbol >= _ANY_VALUE - 1) | (tables.share[table, symbol] == 0))
    symbol = np.where(is_any, _ANY_VALUE, symbol)
    extra = np.where(is_value, _EXTRA_BITS[symbol], (case < 0).astype(np.int64))
    read = np.where(is_value, np.where(is_any, rest, _VALUES[rest] - _LEAST_OF[symbol]), rest * (case < 0))
    low, states = np.zeros_like(case), np.zeros(len(pieces[0]) * _CHAINS, np.int64)
    coded = np.flatnonzero(case >= 0)
    chain = row[coded] * _CHAINS + turn[coded]
    sorted_ = coded[np.argsort(chain, kind="stable")]
    counts = np.bincount(chain, minlength=len(states))
    ends = np.cumsum(counts)
    for back in range(1, int(counts.max(initial=0)) + 1):  # all chains of all slices together, from their ends on
        chains = np.flatnonzero(counts >= back)
        at = sorted_[ends[chains] - back]
        share, whole = tables.share[table[at], symbol[at]], states[chains] + _STATES
        bits = _length(whole) - _length(share)
        bits -= whole >> bits < share
        read[at] |= (whole & (1 << bits) - 1) << extra[at]
        low[at] = bits
        states[chains] = tables.state_of[table[at], tables.first[table[at], symbol[at]] + (whole >> bits) - share]
    firsts = np.searchsorted(row, np.arange(len(states) // _CHAINS + 1))
    beginnings = states.reshape(-1, _CHAINS)
    return [
        _packed(np.concatenate([beginning, read[a:b]]), np.concatenate([[_STATE_BITS] * _CHAINS, (low + extra)[a:b]]))
        for beginning, a, b in zip(beginnings, firsts[:-1], firsts[1:], strict=True)
    ]


def _packed(numbers: Numbers, bits: Numbers) -> bytes:
    """Write the lowest bits of numbers one after another."""
    places = np.arange(2 * _STATE_BITS)
    ones = (numbers[:, None] >> places & 1)[places < bits[:, None]]
    return np.packbits(ones.astype(np.uint8), bitorder="little").tobytes()


# ---------------------------------------------------------------- decoding


class _Units:
    """Units that are read side by side, and where each of them is."""

    def __init__(self, units: Sequence[bytes], tables: PairTables) -> None:
        self._tables = tables
        self.lengths = np.array([len(unit) for unit in units])
        self._bytes = np.zeros((len(units), int(self.lengths.max(initial=0)) + 8), np.int64)
        for row, unit in enumerate(units):
            self._bytes[row, : len(unit)] = np.frombuffer(unit, np.uint8)
        self.at = np.zeros(len(units), np.int64)
        everything = np.arange(len(units))
        self.states = np.column_stack([self.bits(everything, _STATE_BITS) for _ in range(_CHAINS)])

    def bits(self, rows: Numbers, count: int) -> Numbers:
        """Read bits of some units."""
        found = self._peek(rows, self.at[rows]) & (1 << count) - 1
        self.at[rows] += count
        return found

    def _peek(self, rows: Numbers, at: Numbers) -> Numbers:
        """Return the bits from some places on, 17 at least; behind a unit there are others, and its length says so."""
        first = np.minimum(at >> 3, self._bytes.shape[1] - 3)
        three: Numbers = (
            self._bytes[rows, first] | self._bytes[rows, first + 1] << 8 | self._bytes[rows, first + 2] << 16
        )
        three >>= at & 7
        return three

    def four(self, rows: Numbers, table: Numbers, is_there: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
        """Read a symbol of some units by each of the states, where there is one; and the bits that are added to it."""
        tables, states = self._tables, self.states[rows]
        symbol, low = tables.symbol[table, states], tables.bits[table, states]
        extra = np.where(tables.is_value[table], _EXTRA_BITS[symbol], 0)
        taken = np.where(is_there, low + extra, 0)
        ends = np.cumsum(taken, axis=1)
        word = self._peek(rows[:, None], self.at[rows][:, None] + ends - taken)
        after = tables.base[table, states] + (word >> extra & (1 << low) - 1)
        self.states[rows] = np.where(is_there, after, states)
        self.at[rows] += ends[:, -1]
        return symbol, word & (1 << extra) - 1


def decode_pairs(units: Sequence[bytes], transform: Transform, tables: PairTables) -> tuple[Bytes, NDArray[np.bool_]]:
    """Return the differences of units, and which of them are whole."""
    form, reader = _PairForm(transform), _Units(units, tables)
    out = np.zeros((len(units), form.planes, form.blocks * 2 * _BLOCK), np.uint8)
    everything, in_first = np.arange(len(units)), np.zeros((len(units), form.blocks * _BLOCK), np.int64)
    for number in range(form.planes):
        kind, plane = min(number, _KINDS - 1), out[:, number]
        is_less = reader.bits(everything, 1) == 1 if number else np.zeros(len(units), np.bool_)
        pairs = _decode_plane_of_pairs(reader, tables, form, kind, in_first)
        plane[:, ::2], plane[:, 1::2] = (np.array([0, 1, 255, _UNKNOWN])[pairs >> at & 3] for at in (0, 2))
        plane[:, form.plane :] = 0
        is_marked = np.stack([pairs & 3, pairs >> 2], axis=2).reshape(plane.shape) == _MARKED
        is_marked[:, form.plane :] = False
        _decode_values(reader, tables, (out[:, 0], plane), form.order, is_marked, kind)
        plane[is_less] += out[is_less, 0]
        if number == 0:
            in_first = pairs
    rows = np.ascontiguousarray(out[:, :, : form.plane]).reshape(len(units), -1)
    return rows, (reader.states == 0).all(axis=1) & ((reader.at + 7) // 8 == reader.lengths)


def _decode_plane_of_pairs(
    reader: _Units, tables: PairTables, form: _PairForm, kind: int, in_first: Numbers
) -> Numbers:
    units, fours = len(in_first), -(-form.blocks // 4)
    blocks = np.zeros((units, -(-fours // 4) * 4), np.int64)
    for first in range(0, fours, 4):
        is_there = np.broadcast_to(first + np.arange(4) < fours, (units, 4))
        table = np.full((units, 4), tables.of_case[_BLOCK_CASES + kind])
        blocks[:, first : first + 4] = reader.four(np.arange(units), table, is_there)[0]
    there = (blocks[:, :, None] >> np.arange(4) & 1).reshape(units, -1)
    pairs = np.zeros((units, form.above + 1 + form.blocks * _BLOCK), np.int64)
    for block in range(form.blocks):
        rows, first = np.flatnonzero(there[:, block]), block * _BLOCK
        before = pairs[rows, first : first + form.above + 1 + _BLOCK]
        table = tables.of_case[form.around(before, kind, in_first[rows, first : first + _BLOCK])]
        for at in range(0, _BLOCK if len(rows) else 0, 4):
            found, _ = reader.four(rows, table[:, at : at + 4], np.ones((len(rows), 4), np.bool_))
            start = form.above + 1 + first + at
            pairs[rows, start : start + 4] = found
    return pairs[:, form.above + 1 :]


def _decode_values(
    reader: _Units, tables: PairTables, planes: tuple[Bytes, Bytes], order: Numbers, is_marked: Any, kind: int
) -> None:
    """Read the values that are marked in a plane."""
    (first, plane), marked = planes, is_marked[:, order]
    counts = marked.sum(axis=1)
    places = np.zeros((len(plane), int(counts.max(initial=0)) + 4), np.int64)
    row, at = np.nonzero(marked)
    places[row, (np.cumsum(marked, axis=1) - 1)[row, at]] = order[at]
    for turn in range(0, places.shape[1] - 4, 4):
        rows = np.flatnonzero(counts > turn)
        four, is_there = places[rows, turn : turn + 4], turn + np.arange(4) < counts[rows, None]
        known = _SYMBOL_OF[first[rows[:, None], four]]
        table = tables.of_case[_PAIR_CASES + kind * _VALUE_SYMBOLS + known]
        symbol, added = reader.four(rows, table, is_there)
        value = (_LEAST_OF[symbol] + added).astype(np.uint8)
        plane[rows[:, None].repeat(4, axis=1)[is_there], four[is_there]] = value[is_there]
