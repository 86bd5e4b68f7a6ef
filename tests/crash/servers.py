"""Servers to test against, on ports of this machine that were free a moment ago.

A server that is not installed, or does not start, raises `MissingServerError`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEY, SECRET = "holdall", "holdall-secret"


class MissingServerError(Exception):
    """A server that is not installed here."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, nor on those 10,000 above them, which SeaweedFS takes as well."""
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + secrets.randbelow(10_000)
        if port not in found and all(_is_free(one) for one in (port, port + 10_000)):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_for(port: int, process: subprocess.Popen[Any], seconds: float = 60) -> None:
    """Wait until somebody listens on a port."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MissingServerError(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise MissingServerError("the server did not start in time")


def program(name: str) -> str:
    """Return where a program is: beside this Python, or on the path."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise MissingServerError(f"{name} is not installed")
    return found


class Weed:
    """SeaweedFS: a real S3 server, which checks signatures and conditions. It can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = free_ports(4)
        identity = {
            "name": KEY,
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        master, volume, filer, s3 = self._ports
        arguments = [
            program("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._folder / 'data'}",
            f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3",
            f"-s3.port={s3}", f"-s3.config={self._folder / 's3.json'}", "-master.telemetry=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-volume.max=20",
            "-master.volumeSizeLimitMB=256",
        ]  # fmt: skip
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(s3, process)
        except MissingServerError:
            process.kill()
            process.wait()
            raise
        return process

    @property
    def environment(self) -> dict[str, str]:
        """What obstore needs to know."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self._ports[3]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Start it again with what it had."""
        self.process = self._start()


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Weed]:
    """Run SeaweedFS."""
    server = Weed(folder)
    try:
        yield server
    finally:
        server.kill()
