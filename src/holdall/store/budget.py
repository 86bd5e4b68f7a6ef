"""Budget: how much RAM a memory may use, and for which purpose.

A hard limit covers everything that a memory holds in RAM. Part of it is set aside for the open segment, for blocks in
transit, and for batches. The budget "auto" has no hard limit. It limits uncompressed blocks, and with a disk tier all
blocks in RAM, to shares of the RAM that this machine has available when the first segment is full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdall.errors import ArgumentError
from holdall.machine import available_bytes
from holdall.schema import Schema
from holdall.store.columns import estimate_reward_bytes
from holdall.store.tuning import Tuning
from holdall.units import format_bytes, parse_bytes

_MIN_TICKS_PER_SEGMENT = 2
"""Ticks that fit into the smallest segment, even if none of their observations repeats another one."""
_FLAG_BYTES = 1


@dataclass(frozen=True, slots=True)
class Budget:
    """How much RAM a memory may use. Make one with `from_settings`, `limited`, `automatic` or `least`.

    The fields are sizes. The methods answer what a store may do, so no other class has to combine fields.
    """

    max_bytes: int | None  # Hard limit of everything in RAM. None: nothing is evicted before the capacity is reached.
    max_raw_bytes: int  # Bytes of closed blocks that may stay uncompressed.
    max_resident_bytes: int | None  # Bytes in RAM above which the oldest blocks move to disk. None: no such limit.
    max_queued_bytes: int  # Bytes of blocks queued for the compactor above which `add` waits.
    max_segment_bytes: int  # Maximum bytes of the blocks of one segment.
    reserved_bytes: int  # Part of `max_bytes` for the open segment, blocks in transit and batches.
    can_spill: bool  # Whether there is a disk tier.
    staging_bytes: int = 0  # Memory of freed batches that may be kept for later batches.
    is_provisional: bool = False  # Whether `settle` has to measure the available RAM again.

    @classmethod
    def from_settings(cls, budget: str | int | None, schema: Schema, *, can_spill: bool, tuning: Tuning) -> Budget:
        """Return the budget that a user named: "8GiB" or a number of bytes, "auto", or None.

        Raise ArgumentError if `budget` is not a size, or is too small for the smallest useful segments of `schema`.
        """
        if budget is None:
            return cls.least(_measure_available(tuning), can_spill=can_spill, tuning=tuning)
        if isinstance(budget, str) and budget == "auto":
            return cls.automatic(_measure_available(tuning), can_spill=can_spill, tuning=tuning)
        max_bytes = parse_bytes(budget, "budget")
        return cls.limited(max_bytes, can_spill=can_spill, tick_bytes=count_tick_bytes(schema), tuning=tuning)

    @classmethod
    def limited(cls, max_bytes: int, *, can_spill: bool, tick_bytes: int, tuning: Tuning) -> Budget:
        """Return the budget of a memory with a hard limit.

        `tick_bytes` are the bytes of one tick if none of its observations repeats another one. Raise ArgumentError if
        the smallest useful segments do not fit into `max_bytes`.
        """
        min_bytes = tuning.segments_per_limit * _MIN_TICKS_PER_SEGMENT * tick_bytes
        if max_bytes < min_bytes:
            raise ArgumentError(
                f"budget ({format_bytes(max_bytes)}) is too small. Segments of {_MIN_TICKS_PER_SEGMENT} ticks need "
                f"{format_bytes(_MIN_TICKS_PER_SEGMENT * tick_bytes)}, and {tuning.segments_per_limit} of them must "
                f"fit. Pass at least {min_bytes} bytes ({format_bytes(min_bytes)}), or use fewer environments."
            )
        segment_bytes = min(tuning.block_bytes, max_bytes // tuning.segments_per_limit)
        staging_bytes = min(max_bytes // tuning.staging_divisor, tuning.max_staging_bytes)
        return cls(
            max_bytes=max_bytes,
            max_raw_bytes=max_bytes,
            max_resident_bytes=None,
            max_queued_bytes=tuning.min_queued_segments * segment_bytes,
            max_segment_bytes=segment_bytes,
            reserved_bytes=tuning.segments_in_transit * segment_bytes + staging_bytes,
            can_spill=can_spill,
            staging_bytes=staging_bytes,
        )

    @classmethod
    def automatic(cls, available_bytes: int, *, can_spill: bool, tuning: Tuning) -> Budget:
        """Return the budget "auto": the newest blocks stay raw in a share of the memory that is available now."""
        return cls._unlimited(
            available_bytes,
            max_raw_bytes=available_bytes // tuning.auto_raw_divisor,
            max_resident_bytes=available_bytes // tuning.auto_resident_divisor,
            can_spill=can_spill,
            is_provisional=True,
            tuning=tuning,
        )

    @classmethod
    def least(cls, available_bytes: int, *, can_spill: bool, tuning: Tuning) -> Budget:
        """Return the budget None: every block is compressed, and moved to disk if there is a disk tier."""
        return cls._unlimited(
            available_bytes,
            max_raw_bytes=0,
            max_resident_bytes=0,
            can_spill=can_spill,
            is_provisional=False,
            tuning=tuning,
        )

    @classmethod
    def _unlimited(
        cls,
        available_bytes: int,
        *,
        max_raw_bytes: int,
        max_resident_bytes: int,
        can_spill: bool,
        is_provisional: bool,
        tuning: Tuning,
    ) -> Budget:
        queued_bytes = min(available_bytes // tuning.queue_divisor, tuning.max_queued_bytes)
        return cls(
            max_bytes=None,
            max_raw_bytes=max_raw_bytes,
            max_resident_bytes=max_resident_bytes if can_spill else None,
            max_queued_bytes=max(queued_bytes, tuning.min_queued_segments * tuning.block_bytes),
            max_segment_bytes=tuning.block_bytes,
            reserved_bytes=0,
            can_spill=can_spill,
            staging_bytes=tuning.max_staging_bytes,
            is_provisional=is_provisional,
        )

    # ---------------------------------------------------------------- what a store may do

    @property
    def max_held_bytes(self) -> int | None:
        """Hard limit of everything in RAM that is not reserved. None: no limit."""
        if self.max_bytes is None:
            return None
        return max(self.max_bytes - self.reserved_bytes, 0)

    @property
    def target_bytes(self) -> int | None:
        """Bytes in RAM above which blocks are compressed, and then moved to disk. None: no such limit."""
        limits = [limit for limit in (self.max_held_bytes, self.max_resident_bytes) if limit is not None]
        return min(limits, default=None)

    def max_rows_bytes(self, tuning: Tuning) -> int:
        """Return the maximum bytes of rows in one segment.

        It is smaller if all segments are packed, because `add` waits until a segment is packed.
        """
        if self.should_pack(held_bytes=0):
            return min(self.max_segment_bytes, tuning.packed_segment_bytes)
        return self.max_segment_bytes

    def should_pack(self, held_bytes: int) -> bool:
        """Return whether small observations are packed by a store with `held_bytes` in RAM.

        Packed rows take less memory and more time to read.
        """
        return self.max_bytes is not None or held_bytes >= self.max_raw_bytes

    def settle(self, held_bytes: int, tuning: Tuning) -> Budget:
        """Return the final budget of a store with `held_bytes` in RAM.

        The budget "auto" is measured again when the first segment is full, because much of a program's memory is
        allocated after its replay memory was made. Until then, and for every other budget, return `self`.
        """
        if not self.is_provisional or held_bytes < self.max_segment_bytes:
            return self
        measured = Budget.automatic(_measure_available(tuning), can_spill=self.can_spill, tuning=tuning)
        return replace(measured, is_provisional=False)

    def lower(self, nbytes: int, *, raw_bytes: int, held_bytes: int) -> Budget:
        """Return a budget under which compressing blocks, or moving them to disk, frees `nbytes`.

        The store has `held_bytes` in RAM. `raw_bytes` of them are blocks that can be compressed.
        """
        max_resident_bytes = self.max_resident_bytes
        if self.can_spill:
            wanted_bytes = max(held_bytes - nbytes, 0)
            max_resident_bytes = wanted_bytes if max_resident_bytes is None else min(max_resident_bytes, wanted_bytes)
        return replace(
            self,
            max_raw_bytes=min(self.max_raw_bytes, max(raw_bytes - nbytes, 0)),
            max_resident_bytes=max_resident_bytes,
            is_provisional=False,
        )


def count_tick_bytes(schema: Schema) -> int:
    """Return the bytes of one tick if none of its observations repeats another one."""
    obs_bytes = sum(leaf.nbytes for leaf in schema.observation.leaves)
    row_bytes = sum(leaf.nbytes for leaf in (*schema.action.leaves, *schema.extras.leaves))
    return schema.num_envs * (2 * obs_bytes + row_bytes + estimate_reward_bytes(schema) + _FLAG_BYTES)


def _measure_available(tuning: Tuning) -> int:
    if tuning.available_bytes is not None:
        return tuning.available_bytes
    return available_bytes()
