"""Sizes, limits and waiting times of the store, in one place.

Every part of the store takes a `Tuning`. Users never see it. Tests pass one with small values, so that a few ticks fill
a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the store. The defaults are what every memory uses."""

    # Segments and blocks.
    block_bytes: int = 16 * _MIB  # Maximum bytes of unique slices in one block.
    max_segment_ticks: int = 65_536  # Maximum ticks of a segment.
    min_segment_ticks: int = 16  # Ticks of a segment in a memory of small capacity.
    segments_per_capacity: int = 16  # Minimum segments of a full memory, because a segment is freed whole.

    # Which observation fields are cut into slices.
    small_field_bytes: int = 4096  # Largest observation that is stored as rows until a window is found.
    tiny_field_bytes: int = 256  # Largest observation that is always stored as rows.

    # The search for windows.
    detector_min_pairs: int = 8  # Pairs of different observations before a window may be accepted.
    detector_max_pairs: int = 32  # Pairs of different observations before a search is given up.
    detector_agreement: float = 0.75  # Share of the pairs that a window must explain. Resets explain the rest.
    detector_lanes: int = 4  # Lanes that are compared in one tick.
    detector_max_steps: int = 8  # Candidate steps per axis and pair.
    detector_max_pause_doublings: int = 16  # Limit of the pause after unsuccessful searches: 2 ** 16 segments.

    # Packing of small observations.
    packed_segment_bytes: int = 2 * _MIB  # Maximum bytes of rows to pack at once. Adding waits for the packer.
    min_packed_rows: int = 512  # Minimum rows of a packed segment. Fewer rows say little about repetition.
    packed_sample_rows: int = 4096  # Maximum rows in which a plan is searched.
    packed_sample_lanes: int = 8  # Maximum lanes from which these rows are taken.
    packed_search_interval: int = 16  # Segments between two searches for a plan.

    # The budget.
    segments_per_limit: int = 32  # Minimum number of segments that fit into a limit.
    segments_in_transit: int = 6  # Open, queued, being compressed, just compressed, being written, and one spare.
    staging_divisor: int = 8  # A limit divided by this number is set aside for batches.
    max_staging_bytes: int = 256 * _MIB  # Upper bound of the memory that is set aside for batches.
    auto_raw_divisor: int = 4  # "auto": available memory divided by this number may hold uncompressed blocks.
    auto_resident_divisor: int = 2  # "auto" with a disk tier: available memory divided by it may hold rows and blocks.

    available_bytes: int | None = None  # RAM that counts as available. None: measure it.

    # Batches.
    bytes_per_thread: int = 2**19  # Bytes of a batch for which one more thread is used.

    # The compactor.
    min_queued_segments: int = 2  # Segments that may always be queued.
    queue_divisor: int = 32  # Without a limit, available memory divided by this number may be queued.
    max_queued_bytes: int = 1024 * _MIB  # Without a limit, maximum bytes that may be queued.
    poll_s: float = 0.2  # Seconds between checks of a thread that waits for the worker.
    slow_warning_s: float = 10.0  # Seconds of waiting after which a warning is logged.
    drop_warning_factor: int = 10  # Early drops are logged again when their number grew by this factor.
    repeat_warning_s: float = 600.0  # Seconds before a failure of the same kind is logged again.
    stop_timeout_s: float = 30.0  # Seconds that closing waits for the current job, because a disk may hang.

    # The choice of codecs.
    codec_rest_blocks: int = 8  # Blocks of a field before a worse ratio makes the compactor choose its codec again.
    max_hurried_blocks: int = 8  # Blocks of a field that may be compressed with a fast codec before the choice.

    # The disk tier.
    spill_file_bytes: int = 1 * _MIB  # Minimum size at which no more blocks are added to a spill file.
    spill_files: int = 32  # A large disk tier has about this many files, because disk space is freed by file.
    write_bytes: int = 4 * _MIB  # Bytes of one write call.
    disk_trial_interval: int = 3  # Segments between two blocks that are written on trial to a full disk.

    def choose_segment_ticks(self, capacity_ticks: int, tick_bytes: int, max_segment_bytes: int) -> int:
        """Return the maximum number of ticks of a segment.

        `tick_bytes` are the bytes of one tick that are stored as rows. The rows of a segment take at most
        `max_segment_bytes`, because a memory with a limit frees whole segments.
        """
        ticks = max(capacity_ticks // self.segments_per_capacity, self.min_segment_ticks)
        ticks = min(ticks, self.max_segment_ticks)
        if tick_bytes > 0:
            ticks = min(ticks, max_segment_bytes // tick_bytes)
        return max(ticks, 1)
