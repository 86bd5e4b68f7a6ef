"""Replay memories over the machines of a Ray cluster. `holdall.ray` has the public names.

    add     writer.py -> segment.py (build, compress) -> stream.py -> shard.py -> journal.py -> shard_data.py
    sample  learner.py (which shards) -> shard.py -> shard_data.py -> answer.py -> learner.py -> batch

    for users      memory.py (ReplayMemory) and handle.py (attach); config.py checks settings, and access.py checks the
                   cluster's token
    actors         roster.py lists the shards and runs the limiter (limiter.py); shard.py; fleet.py starts and ends both
    each process   members.py records which shards answer and what they hold; calls.py waits for actors; metrics.py
    in a shard     shard_data.py (draws) over shard_store.py (rows) and raw_blocks.py (the newest blocks, uncompressed)
    messages       messages.py and ids.py; shared_block.py is memory that processes of one machine share

Guarantees: a batch contains, bit for bit, what was added. A memory of one shard returns the batches of a local memory
with the same seed. A segment is accepted once; with a journal, it is durable before it is acknowledged or drawn.
"""
