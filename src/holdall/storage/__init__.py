"""Storage: one transition's way into memory and out again.

    layout -> blocks, codec -> slices -> snapshot, rings -> records, segment -> tiers, sealer -> store

Other packages import the names below, and kernels (`Kernels`, `Coder`) are handed in: storage knows no loop of its own.
"""

from holdall.storage.blocks import (
    CarriedSlices,
    Coded,
    Coder,
    Extent,
    FrozenBlock,
    KeptBlock,
    SealedSlices,
    SegmentFile,
    SliceBlock,
    address,
    reserve,
)  # fmt: skip
from holdall.storage.codec import COST_CAPS, Codec, Dictionary, Method, Predictor, Transform
from holdall.storage.layout import Window, WindowSearches, as_bytes
from holdall.storage.rings import Rows
from holdall.storage.sealed_segment import SealedSegment, pack_segment, segment_needs, unpack_segment
from holdall.storage.sealer import Sealer
from holdall.storage.slices import ClosedPart, Kernels, OpenPart, Places, Segment
from holdall.storage.snapshot import FrozenStore, FullBlock, RowChunk, StoreContent, Tick, UnchangedStore, steps_in
from holdall.storage.store import Store
from holdall.storage.tiers import Budget, SpillFolder

__all__ = [
    "COST_CAPS", "Budget", "CarriedSlices", "ClosedPart", "Codec", "Coded", "Coder", "Dictionary", "Extent",
    "FrozenBlock", "FrozenStore", "FullBlock", "KeptBlock", "Kernels", "Method", "OpenPart", "Places", "Predictor",
    "RowChunk", "Rows", "SealedSegment", "SealedSlices", "Sealer", "Segment", "SegmentFile", "SliceBlock",
    "SpillFolder", "Store", "StoreContent", "Tick", "Transform", "UnchangedStore", "Window", "WindowSearches",
    "address", "as_bytes", "pack_segment", "reserve", "segment_needs", "steps_in", "unpack_segment",
]  # fmt: skip
