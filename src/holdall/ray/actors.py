"""Actors: how shards and the roster are started. Ray's own types know little of actors, so this is where they end."""

from __future__ import annotations

from typing import Any

import ray

from holdall.ray.limiter import RateLimit
from holdall.ray.roster import NAMESPACE, Roster
from holdall.ray.shard import GROUPS, Shard

_TALKS = 16
"""Questions that the roster hears at a time."""


def start_roster(name: str, limit: RateLimit | None, survives: bool) -> Any:
    """Start a memory's roster under a name by which shards find it."""
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Roster)
    return actor.options(name=name, namespace=NAMESPACE, max_concurrency=_TALKS).remote(name, limit, survives)


def start_shard(options: dict[str, Any], *arguments: Any) -> Any:
    """Start a shard. Ray restarts it after a loss; what changes it is never called again by Ray itself.

    Args:
        options: Where it is to be started.
    """
    remote: Any = ray.remote
    actor = remote(max_restarts=-1, max_task_retries=0, concurrency_groups=GROUPS)(Shard)
    return actor.options(**options).remote(*arguments)
