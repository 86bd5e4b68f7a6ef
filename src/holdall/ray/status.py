"""How each shard is: where it runs, what it holds, and what its process takes.

In:  an actor.  Out: a few numbers; also of one that does not answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from holdall.ray.standing import Standing


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard at one moment; all but its number is unknown while it does not answer."""

    number: int
    answers: bool
    node: str = ""
    pid: int = 0
    uss_bytes: int = 0  # memory that its process has to itself
    standing: Standing | None = None


def status_of(number: int, actor: Any, patience_s: float) -> ShardStatus:
    """Ask a shard how it is."""
    try:
        node, pid, uss_bytes, standing = ray.get(actor.process.remote(), timeout=patience_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return ShardStatus(number, answers=False)
    return ShardStatus(number, True, str(node), int(pid), int(uss_bytes), Standing.of(standing))
