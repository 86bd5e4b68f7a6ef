"""Who may reach a memory over shards: whoever may call Ray may run any code on its machines.

In:  the machines of a cluster and the process's settings.  Out: nothing, or a refusal that says what to do.
Invariant: a memory is not started, nor a cluster joined, where machines other than this one could call it without a
token, and a token's file is nobody else's to read.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

from holdall.cluster.token import close_token_file, require_token
from holdall.errors import ArgumentError, ShardError

_ANSWERS_S = 5.0


def require_safe_cluster() -> None:
    """Refuse a cluster that strangers can reach; start one on this machine if there is none."""
    if not ray.is_initialized():
        close_token_file(os.environ)
        ray.init(include_dashboard=False)
    nodes: Any = ray.nodes
    alive = [str(node["NodeManagerAddress"]) for node in nodes() if node["Alive"]]
    require_token(alive, os.environ)
    close_token_file(os.environ)


def join_cluster(address: str | None, namespace: str) -> str:
    """Join a cluster that runs; return its address.

    Args:
        address: Host and port of Ray's head; None: the cluster that runs on this machine.
    """
    close_token_file(os.environ)
    if address is not None:
        require_head(address)
    init: Any = ray.init
    try:
        init(address=address or "auto", namespace=namespace, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()[-1].partition(". ")[0]
        raise ShardError(
            f"no Ray could be joined at {address or 'this machine'} ({cause}); name the address of one that runs, on a "
            "machine of its cluster, and see that RAY_AUTH_MODE and the token are those of the cluster"
        ) from error
    require_safe_cluster()
    return str(ray.get_runtime_context().gcs_address)


def require_head(address: str) -> None:
    """Refuse what is no address, or nobody's, at once: Ray itself would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ArgumentError(
            f"address ({address!r}) must be host and port of Ray's head, as in 10.0.0.3:6379; run it on a machine of "
            "the cluster: Ray's client protocol (ray://) is one more open port, and is not used"
        )
    host = host.strip("[]")
    require_token([host], os.environ)
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ShardError(f"nobody answers at {address} ({error}); name host and port of Ray's head") from error
