"""Replay memories over the machines of a Ray cluster. `holdall.ray` has the public names.

    add     writer.py -> segment.py (build, compress) -> stream.py -> shard.py -> journal.py -> shard_data.py
    sample  learner.py (which shards) -> shard.py -> shard_data.py -> answer.py -> learner.py -> batch

Around that: `roster.py` knows which shards there are and grants inserts and samples (`limiter.py`), `members.py` is
what one process knows of the shards, `fleet.py` starts and ends the actors, `handle.py` and `memory.py` have the
classes that users call.

Guarantees: a batch contains, bit for bit, what was added. A memory of one shard returns the batches of a local memory
with the same seed. A segment is accepted once; with a journal, it is durable before it is acknowledged or drawn.
"""
