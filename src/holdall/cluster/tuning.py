"""Sizes and waiting times of a memory over shards. Users never see them. Tests pass small values."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdall.store.tuning import Tuning

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class ClusterTuning:
    """Constants of a memory over shards. The defaults are what every memory uses."""

    # Waiting for shards. The memory's `patience_s` replaces both. Ray needs 70 seconds to give up a frozen machine.
    learner_patience_s: float = 10.0  # Seconds after which a learner counts a silent shard as lost.
    writer_patience_s: float = 90.0  # Seconds that a writer waits for a shard.

    # Writers.
    segment_rows: int = 128  # Rows of a segment.
    max_segment_rows: int = 512  # Rows of a segment that `extend` fills within `gather_s`.
    gather_s: float = 0.01  # Seconds for which `extend` fills a segment beyond `segment_rows`.
    max_segments_in_flight: int = 8  # Per shard.
    max_bytes_in_flight: int = 16 * _MIB  # Per shard.
    max_backlog_bytes: int = 32 * _MIB  # Backlog of a shard's journal above which writers send one segment at a time.
    reason_s: float = 1.0  # Seconds to wait for a silent shard to say why it accepts nothing.

    # Shards.
    slot_bytes: int = 16 * _MIB  # Bytes of segments in one slot of a journal.
    full_slot_interval: int = 32  # Slots from one full slot to the next, see journal.py.
    retry_s: float = 0.5  # Seconds before a failed write to a journal is repeated.
    ownership_s: float = 5.0  # Seconds between checks that a journal still belongs to its shard.
    priorities_s: float = 5.0  # Seconds between two writes of priorities. A crash loses the changes since.

    # Learners.
    pause_s: float = 0.05  # Seconds between two checks of another process.
    list_s: float = 2.0  # Seconds between two questions to the roster about new shards.
    probe_s: float = 0.25  # Seconds between two questions to a lost shard.
    max_probes: int = 16  # Unanswered questions to a lost shard that are kept.
    min_shared_bytes: int = 2**16  # Observations of a batch that shards on the same machine write to shared memory.

    # Actors of `collect`.
    progress_s: float = 10.0  # Seconds that an actor has to report its progress.

    # Limiter.
    notice_s: float = 5.0  # Seconds of waiting for the limiter after which a warning is logged.

    store: Tuning = field(default_factory=Tuning)  # Of the writers' segments and the shards' stores.
