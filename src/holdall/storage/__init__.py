"""Storage: one transition's way into memory and out again.

    ticks -> blocks -> slices, records -> snapshot, rings -> segment -> tiers, sealer -> store

Other packages import the names below, and kernels (`Kernels`, `Coder`) are handed in: storage knows no loop of its own.
"""

from holdall.storage.batch_source import (
    ALIGNMENT_BYTES,
    APART_FIELDS,
    COLUMN_FIELDS,
    RECORD_FIELDS,
    BatchArray,
    BatchReader,
    BatchSource,
    DecodedSegments,
    Places,
    Rows,
    RowSources,
    fresh_bytes,
)
from holdall.storage.blocks import (
    COLOUR_PALETTE_BYTES,
    MOST_UNIT_COLOURS,
    NO_COLOUR,
    TRANSFORM_FIELDS,
    CarriedSlices,
    Codec,
    Coded,
    Dictionary,
    Extent,
    KeptBlock,
    Method,
    Predictor,
    SealedSlices,
    SegmentFile,
    SliceBlock,
    Transform,
    address,
    first_bytes,
    mapping_of,
    release_tail,
    reserve,
    stored,
)
from holdall.storage.codec import candidates
from holdall.storage.codec_choice import COST_CAPS, choose
from holdall.storage.coded_units import Order, in_memory, places_in, places_of, unit_of
from holdall.storage.columns import COLUMN_TABLES, NEVER
from holdall.storage.records import (
    SLICES,
    Buffer,
    CompressedParts,
    Read,
    Record,
    SpillFolder,
    array_of,
    numbers,
    pack,
    pack_dictionary,
    pack_slices,
    parsed,
    require_kind,
    unpack,
    unpack_dictionary,
    unpack_slices,
    unparsed,
)
from holdall.storage.remote_file import AwaitedFile, Demand, bring, bring_places, bring_slices
from holdall.storage.repair import Repair
from holdall.storage.rollout import FinalObservations, RolloutFields, gather_padded, gather_rows
from holdall.storage.sealed_segment import (
    Encoder,
    EncoderCodecs,
    SealedSegment,
    pack_segment,
    records_in,
    sliced_leaves,
    unpack_segment,
)
from holdall.storage.segment import SEGMENT_BYTES, FullBlock, SegmentIndex
from holdall.storage.slices import (
    NEXT_IS_WHOLE,
    ClosedPart,
    Cursors,
    OpenPart,
    OpenSlices,
    Segment,
    Window,
    WindowScout,
    as_bytes,
    lies_direct,
)
from holdall.storage.snapshot import (
    PIECE_BYTES,
    Apart,
    FrozenRows,
    FrozenStore,
    Like,
    LiveRows,
    RowChunk,
    StoreContent,
    chunk_numbers,
    copy_held,
    is_settled,
    new_ring,
    pack_logs,
    pack_piece,
    pack_rows,
    put_rows,
    rows_of,
    unpack_logs,
    unpack_piece,
    unpack_rows,
)
from holdall.storage.store import Store, UnchangedStore, last_rows
from holdall.storage.ticks import (
    NO_ROOM,
    NOT_CONTINUED,
    WATCHED_BYTES,
    Arguments,
    Coder,
    FastTick,
    FlatField,
    Form,
    Kernels,
    SlicedTick,
    StepsLeft,
    Tick,
    TickWriter,
    Watch,
    steps_in,
)
from holdall.storage.tiers import Budget
