"""For your own tests: an oracle, streams of synthetic experience, and contracts as test classes.

    class TestMySampler(holdall.testing.SamplerContract):
        def make_sampler(self):
            return MySampler()

Subclass a contract to test something of your own by the rules of holdall's, which pass the same classes:
`SamplerContract`, `CodecContract`, `MemoryContract` for adapters, `ReplayContract` for drop-ins that replace a
framework's buffer, `ReplayMemoryContract` for a form or a device of `ReplayMemory`, and `BlobStoreContract`. pytest
collects the subclass and runs every rule. Plain `unittest` works, too, with `unittest.TestCase` as second base.
Everything is compared with the oracle or with the framework's buffer, bit for bit. Nothing here imports pytest.
`holdall.testing.strategies` needs Hypothesis and is imported by name.
"""

from __future__ import annotations

from holdall.testing.blob_store_contract import BlobStoreContract
from holdall.testing.codec_contract import CodecContract
from holdall.testing.memory_contract import MemoryContract
from holdall.testing.oracle import OracleMemory, as_array, assert_same_bits
from holdall.testing.replay_contract import ReplayContract
from holdall.testing.replay_memory_contract import ReplayMemoryContract
from holdall.testing.sampler_contract import SamplerContract
from holdall.testing.streams import LeafPlan, Mishaps, Stream, random_rows

__all__ = [
    "BlobStoreContract",
    "CodecContract",
    "LeafPlan",
    "MemoryContract",
    "Mishaps",
    "OracleMemory",
    "ReplayContract",
    "ReplayMemoryContract",
    "SamplerContract",
    "Stream",
    "as_array",
    "assert_same_bits",
    "random_rows",
]
