"""A plain-list oracle and streams to hold a memory to it; for holdall's own tests and yours.

`holdall.testing.strategies` needs Hypothesis and is imported by name.
"""

from holdall.testing.oracle import OracleMemory, assert_same_bits
from holdall.testing.streams import LeafPlan, Mishaps, Stream, random_rows

__all__ = ["LeafPlan", "Mishaps", "OracleMemory", "Stream", "assert_same_bits", "random_rows"]
