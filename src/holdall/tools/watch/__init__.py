"""Watch: where the memory of a training is, how it grows, and what to do about it.

An agent in the training publishes names and counters (agent.py, exchange.py). A watcher in another process joins them
with the kernel's figures (attribution.py), keeps readings (reading.py) and judges them (verdicts.py). The guard runs in
the training itself and frees memory when it runs short (guard.py).
"""
