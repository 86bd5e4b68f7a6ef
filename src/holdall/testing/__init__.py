"""For your own tests: an oracle, streams of synthetic experience, and contracts as test classes.

    class TestMySampler(holdall.testing.SamplerContract):
        def make_sampler(self):
            return MySampler()

Subclass a contract to test a class of your own by the same rules as holdall's classes: `SamplerContract`,
`CodecContract`, `MemoryContract` for adapters, `ReplayContract` for drop-ins that replace a framework's buffer,
`ReplayMemoryContract` for a form or a device of `ReplayMemory`, and `BlobStoreContract`. pytest collects the subclass
and runs every rule. Plain `unittest` works, too, with `unittest.TestCase` as second base. Transitions are compared with
those of the oracle or of the framework's buffer, bit for bit. No module of this package imports pytest.
`holdall.testing.strategies` needs Hypothesis, so this package does not import it.
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
