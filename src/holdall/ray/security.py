"""Who may reach a memory over shards: whoever may call Ray may run any code on its machines.

In:  the machines of a cluster and the process's settings.  Out: nothing, or a refusal that says what to do.
Invariant: a memory is not started where machines other than this one could call it without a token, and a token's file
is nobody else's to read.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray

from holdall.errors import ShardError

_MODE, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
_LOG = logging.getLogger("holdall")


def require_safe_cluster() -> None:
    """Refuse a cluster that strangers can reach; start one on this machine if there is none."""
    if not ray.is_initialized():
        close_token_file(os.environ)
        ray.init(include_dashboard=False)
    nodes: Any = ray.nodes
    alive = [str(node["NodeManagerAddress"]) for node in nodes() if node["Alive"]]
    require_token(alive, os.environ)
    close_token_file(os.environ)


def require_token(addresses: Iterable[str], environment: Mapping[str, str]) -> None:
    """Refuse addresses beyond this machine unless calls need a token."""
    beyond = [address for address in addresses if not _is_loopback(address)]
    if beyond and environment.get(_MODE, "").lower() != "token":
        raise ShardError(
            f"Ray listens at {beyond[0]} and asks for no token, so whoever reaches it can run code there; start it "
            f"with {_MODE}=token on every machine (ray get-auth-token --generate), and keep its ports off public "
            "networks: a token does not encrypt"
        )


def close_token_file(environment: Mapping[str, str]) -> None:
    """See to it that the token's file is for its owner alone: Ray writes it for all to read."""
    path = Path(environment.get(_PATH) or Path.home() / ".ray" / "auth_token")
    try:
        mode = path.stat().st_mode
    except OSError:  # a token in the environment, or none
        return
    if os.name != "posix" or not stat.S_IMODE(mode) & 0o077:
        return
    try:
        path.chmod(0o600)
        _LOG.warning("%s could be read by others; its mode is 0600 now", path)
    except OSError as error:
        raise ShardError(
            f"{path} can be read by others, and cannot be closed to them ({error}); run chmod 600 on it"
        ) from error


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
