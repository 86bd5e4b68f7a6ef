"""Who may reach a cluster of Ray's, and how one is joined: who may call Ray may run any code on its machines.

Memories over shards and `holdall watch --ray` come through here; nothing below knows of either.

In:  the machines of a cluster, what its head says to a stranger, and the process's settings.  Out: nothing, or a
refusal that says what to do.
Invariant: a memory is not started, nor a cluster joined, where machines other than this one could call it without a
token, and a token's file is nobody else's to read. Ray reads the token when it is imported, so that importing this
file does not import Ray.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

from holdall.errors import ArgumentError, ShardError

_MODE, _PATH, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
_LOG = logging.getLogger("holdall")


def use_token(environment: MutableMapping[str, str]) -> None:
    """Have calls carry the user's token if there is one; Ray does so by itself only where it starts a cluster.

    Ray reads it when it is imported.
    """
    if _MODE not in environment and (_TOKEN in environment or _token_path(environment).is_file()):
        environment[_MODE] = "token"


def require_closed(addresses: Iterable[str], head: str, environment: Mapping[str, str]) -> None:
    """Refuse addresses beyond this machine unless calls need a token: here, and whatever is set here, at the head."""
    beyond = [address for address in addresses if not _is_loopback(address)]
    if not beyond:
        return
    if environment.get(_MODE, "").lower() != "token":
        why = f"Ray listens at {beyond[0]} and asks for no token"
    elif answers_strangers(head):
        why = f"Ray listens at {beyond[0]}, and its head at {head} answers without a token, whatever {_MODE} is here"
    else:
        return
    raise ShardError(
        f"{why}, so all who reach it can run code there; start it with {_MODE}=token on every machine (ray "
        "get-auth-token --generate), and keep its ports off public networks: a token does not encrypt"
    )


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _HEADERS, _DATA, _END_HEADERS, _END_STREAM = 4, 1, 0, 4, 1
_REFUSED = b"grpc-status\x0216"
_ASKED = {
    ":method": "POST", ":scheme": "http", ":path": "/ray.rpc.NodeInfoGcsService/GetClusterId", ":authority": "ray",
    "content-type": "application/grpc", "te": "trailers",
}  # fmt: skip
"""A harmless question of Ray's; one that it does not know is refused for want of a token before that is said."""


def answers_strangers(head: str) -> bool:
    """Whether a head of Ray's answers somebody without a token; False also where that cannot be seen: behind TLS.

    It is asked over a connection of its own, as Ray's client has the token of this process, or none.
    """
    host, _, port = head.rpartition(":")
    # Literals that are not indexed, as HPACK has them: a name and a value, each behind its length.
    packed = [f"\0{chr(len(name))}{name}{chr(len(value))}{value}".encode() for name, value in _ASKED.items()]
    frames = [
        _frame(_SETTINGS, 0, 0, b""),
        _frame(_HEADERS, _END_HEADERS, 1, b"".join(packed)),
        _frame(_DATA, _END_STREAM, 1, bytes(5)),
    ]
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S) as connection:
            connection.sendall(_PREFACE + b"".join(frames))
            heard = b""
            while (more := connection.recv(1 << 16)) and len(heard) < 1 << 20:
                heard += more
                said = [body for kind, stream, body in _frames(heard) if stream and kind in (_HEADERS, _DATA)]
                if said:
                    return not any(_REFUSED in body for body in said)
    except OSError:
        return False
    return False


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _frames(heard: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Read the whole frames of HTTP/2 in some bytes: kind, stream and body of each."""
    while len(heard) >= 9 and len(heard) >= (end := 9 + int.from_bytes(heard[:3], "big")):
        yield heard[3], int.from_bytes(heard[5:9], "big"), heard[9:end]
        heard = heard[end:]


def close_token_file(environment: Mapping[str, str]) -> None:
    """Make the token's file readable by its owner alone: Ray writes it for all to read."""
    path = _token_path(environment)
    if os.name != "posix" or not path.is_file() or not path.stat().st_mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        raise ShardError(
            f"{path} can be read by others, and cannot be closed to them ({error}); run chmod 600 on it"
        ) from error
    _LOG.warning("%s could be read by others; its mode is 0600 now", path)


def _token_path(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(_PATH) or Path.home() / ".ray" / "auth_token")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


_ANSWERS_S = 5.0


def require_safe_cluster() -> None:
    """Refuse a cluster that strangers can reach; start one on this machine if there is none."""
    import ray  # noqa: PLC0415  it reads its settings when it is imported

    if not ray.is_initialized():
        close_token_file(os.environ)
        ray.init(include_dashboard=False)
    alive = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    require_closed(alive, str(ray.get_runtime_context().gcs_address), os.environ)
    close_token_file(os.environ)


def join_cluster(address: str | None, namespace: str) -> str:
    """Join a cluster that runs; return its address.

    Args:
        address: Host and port of Ray's head; None: the cluster that runs on this machine.
    """
    import ray  # noqa: PLC0415

    close_token_file(os.environ)
    if address is not None:
        require_head(address)
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, configure_logging=False)
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
    require_closed([host], address, os.environ)
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ShardError(f"nobody answers at {address} ({error}); name host and port of Ray's head") from error


_HEALTH_MS = {
    "health_check_initial_delay_ms": 5_000, "health_check_period_ms": 3_000, "health_check_timeout_ms": 10_000,
}  # fmt: skip
"""Ray's defaults; its settings are read from the environment, as Ray reads them on the machine of its head."""


def machine_given_up_s() -> float:
    """Return how long it may take until Ray gives up a machine that hangs, by its settings."""
    delay, period, timeout = (_setting(name, usual) / 1000 for name, usual in _HEALTH_MS.items())
    return delay + _setting("health_check_failure_threshold", 5) * (period + timeout)


def _setting(name: str, usual: int) -> int:
    """Read one of Ray's settings: as the cluster has it, where Ray says so, or as this process's environment has it."""
    import ray  # noqa: PLC0415

    known = getattr(getattr(getattr(ray, "_raylet", None), "Config", None), name, None)
    try:
        return int(os.environ.get(f"RAY_{name}", usual) if known is None else known())
    except (TypeError, ValueError):
        return usual
