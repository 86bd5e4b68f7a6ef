"""Access to a Ray cluster: how a process joins one, and which clusters holdall refuses.

Every program that can call Ray can run any code on its machines. So holdall uses a cluster of several machines only if
this process sends Ray's token with every call, and it makes sure that nobody else can read the file with the token. Ray
itself checks the token. docs/scale.md describes how to set it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray

from holdall.cluster.calls import read_last_line
from holdall.errors import ArgumentError, ShardError

_MODE = "RAY_AUTH_MODE"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_CONNECT_S = 5.0
"""Seconds to wait for Ray's head to accept a connection."""
_LOG = logging.getLogger("holdall")


def require_token(addresses: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise ShardError if one of `addresses` is on another machine and calls carry no token."""
    remote = [address for address in addresses if not _is_loopback(address)]
    if remote and environment.get(_MODE, "").lower() != "token":
        raise ShardError(
            f"Ray listens at {remote[0]}, and this process sends no token. Everybody who reaches that address could "
            f"run code there. Set {_MODE}=token on every machine (ray get-auth-token --generate), and keep Ray's ports "
            "off public networks, because a token does not encrypt."
        )


def protect_token_file(environment: Mapping[str, str]) -> None:
    """Make the file with the token readable by its owner only. Ray writes it readable by all users."""
    path = Path(environment.get(_TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if os.name != "posix" or not path.is_file() or not path.stat().st_mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        raise ShardError(
            f"Other users can read {path}, and its mode cannot be changed ({error}). Run chmod 600."
        ) from error
    _LOG.warning("Other users could read %s. Its mode is 0600 now.", path)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def require_safe_cluster() -> None:
    """Raise ShardError if the cluster has other machines and this process sends no token.

    If this process has not joined a cluster, start Ray on this machine.
    """
    if not ray.is_initialized():
        protect_token_file(os.environ)
        ray.init(include_dashboard=False)
    nodes = ray.nodes()
    require_token([str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]], os.environ)
    protect_token_file(os.environ)


def join_cluster(address: str | None, namespace: str) -> None:
    """Join a running cluster.

    Args:
        address: Host and port of Ray's head. None: the cluster that runs on this machine.
    """
    protect_token_file(os.environ)
    if address is not None:
        _require_head(address)
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        cause = read_last_line(error.__cause__ or error).partition(". ")[0]
        raise ShardError(
            f"Could not join a Ray cluster at {address or 'this machine'} ({cause}). Pass the address of a running "
            f"cluster, run this program on one of its machines, and use the same {_MODE} and token as the cluster."
        ) from error
    require_safe_cluster()


def _require_head(address: str) -> None:
    """Raise an error within seconds if nothing answers at `address`. Ray itself would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ArgumentError(
            f"address ({address!r}) must be host and port of Ray's head, as in 10.0.0.3:6379. Run this program on a "
            "machine of the cluster. holdall does not use Ray's client protocol (ray://), which needs one more port."
        )
    host = host.strip("[]")
    require_token([host], os.environ)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ShardError(f"Nothing answers at {address} ({error}). Pass host and port of Ray's head.") from error
