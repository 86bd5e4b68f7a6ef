"""The token that calls to Ray need, as this process and its user have it. Nothing here imports Ray.

In:  addresses, and the process's settings.  Out: nothing, or a refusal that says what to do.
Invariant: beyond this machine nothing is done without a token, and a token's file is nobody else's to read.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from holdall.errors import ShardError

_MODE, _PATH, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
_LOG = logging.getLogger("holdall")


def use_token(environment: MutableMapping[str, str]) -> None:
    """Have calls carry the user's token if there is one; Ray does so by itself only where it starts a cluster.

    Ray reads it when it is imported.
    """
    if _MODE not in environment and (_TOKEN in environment or _token_path(environment).is_file()):
        environment[_MODE] = "token"


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
    path = _token_path(environment)
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


def _token_path(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(_PATH) or Path.home() / ".ray" / "auth_token")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
