"""For your own tests: an oracle, streams of synthetic experience, and contracts as test classes.

Subclass `SamplerContract`, `CodecContract` or `MemoryContract` to hold a sampler, a codec or a memory of your own to
the rules of holdall's. `holdall.testing.strategies` needs Hypothesis and is imported by name.
"""

from holdall.testing.contracts import CodecContract, MemoryContract, SamplerContract
from holdall.testing.oracle import OracleMemory, as_array, assert_same_bits
from holdall.testing.streams import LeafPlan, Mishaps, Stream, random_rows

__all__ = [
    "CodecContract", "LeafPlan", "MemoryContract", "Mishaps", "OracleMemory", "SamplerContract", "Stream", "as_array",
    "assert_same_bits", "random_rows",
]  # fmt: skip
