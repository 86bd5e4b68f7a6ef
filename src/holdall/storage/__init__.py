"""Storage: one transition's way into memory and out again.

    ticks -> codec, blocks -> slices, records -> snapshot, rings -> segment -> tiers, sealer -> tick_store -> store

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
    WATCHED_BYTES,
    CarriedSlices,
    Coded,
    Coder,
    Extent,
    KeptBlock,
    SealedSlices,
    SegmentFile,
    SliceBlock,
    Watch,
    address,
    first_bytes,
    mapping_of,
    release_tail,
    reserve,
)
from holdall.storage.codec import (
    COLOUR_PALETTE_BYTES,
    MOST_UNIT_COLOURS,
    NO_COLOUR,
    TRANSFORM_FIELDS,
    Codec,
    Dictionary,
    Method,
    Order,
    Predictor,
    SlicePlaces,
    Transform,
    candidates,
    stored,
)
from holdall.storage.codec_choice import COST_CAPS, choose
from holdall.storage.columns import COLUMN_TABLES, NEVER
from holdall.storage.pairs import PairTables, decode_pairs, encode_pairs, train_pairs
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
    pack_file,
    pack_slices,
    parsed,
    require_kind,
    unpack,
    unpack_dictionary,
    unpack_file,
    unpack_slices,
    unparsed,
)
from holdall.storage.remote_file import AwaitedFile, Demand, bring, bring_places, bring_slices
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
from holdall.storage.segment import SEGMENT_BYTES, SegmentIndex
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
from holdall.storage.store import FullBlock, Store, UnchangedStore, last_rows
from holdall.storage.tick_store import Repair
from holdall.storage.ticks import (
    NO_ROOM,
    NOT_CONTINUED,
    Arguments,
    FastTick,
    FlatField,
    Form,
    Kernels,
    SlicedTick,
    StepsLeft,
    Tick,
    TickWriter,
    steps_in,
)
from holdall.storage.tiers import Budget
