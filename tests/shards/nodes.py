"""Ray clusters whose machines are processes on this machine, so that tests can kill, freeze or disconnect a machine.

A node is the process `ray start --block` and its children. With `apart=True`, every worker is in a network namespace of
its own behind a bridge, and its cable can be pulled. This needs root and `ip`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
import ray

_TUNED = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings with which Ray gives up a lost node after about 5 seconds instead of a minute."""
_TRIES = 3


def make_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that starts nodes. Ray reads it when it is imported.

    Args:
        folder: Empty folder with a short path for Ray, so that `ray.init` of other programs does not find this cluster.
    """
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(24), encoding="ascii")
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(folder)}
    return own | {"RAY_USAGE_STATS_ENABLED": "0"} | _TUNED


def can_be_apart() -> bool:
    """Return whether this process can make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and _ip("link", "show").returncode == 0


class Node:
    """One machine."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, cable: str | None) -> None:
        self.address = address
        self._process = process
        self._cable = cable
        self._frozen: list[psutil.Process] = []

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the node."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill all processes of the node."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop all processes with SIGSTOP."""
        self._frozen = self.processes()
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue all stopped processes."""
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._frozen = []

    def cut(self) -> None:
        """Pull the cable."""
        _require(_ip("link", "set", str(self._cable), "down"))

    def mend(self) -> None:
        """Plug it in again."""
        _require(_ip("link", "set", str(self._cable), "up"))


class Nodes:
    """A head and some workers.

    Args:
        apart: Whether every worker has a network of its own.
    """

    def __init__(self, workers: int, apart: bool) -> None:
        self._tag = secrets.token_hex(2)
        self._namespaces: list[str] = []
        self._apart = apart
        self.workers: list[Node] = []
        self._joined = workers
        try:
            host = self._make_bridge() if apart else _find_own_address()
            port = _find_free_port(host)
            self.address = f"{host}:{port}"
            self.head = self._start(host, None, "--head", f"--port={port}", "--include-dashboard=false")
            for number in range(workers):
                self.workers.append(self._join(number, host))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all processes, and delete the networks."""
        for node in [*self.workers, *([self.head] if hasattr(self, "head") else [])]:
            node.thaw()
            node.kill()
        for namespace in self._namespaces:
            _ip("netns", "delete", namespace)
        if self._apart:
            _ip("link", "delete", f"hb{self._tag}")

    def _make_bridge(self) -> str:
        """Make a network for these nodes. Return the head's address in it."""
        name = f"hb{self._tag}"
        host = f"10.231.{int(self._tag[:2], 16)}.1"
        _require(_ip("link", "add", name, "type", "bridge"))
        _require(_ip("address", "add", f"{host}/24", "dev", name))
        _require(_ip("link", "set", name, "up"))
        return host

    def join(self) -> None:
        """Start one more worker."""
        self._joined += 1
        self.workers.append(self._join(self._joined, self.address.partition(":")[0]))

    def _join(self, number: int, host: str) -> Node:
        if not self._apart:
            return self._start(host, None, f"--address={self.address}")
        namespace, inner, outer = (f"{kind}{self._tag}{number}" for kind in ("hn", "hi", "ho"))
        address = f"{host.rpartition('.')[0]}.{number + 2}"
        _require(_ip("netns", "add", namespace))
        self._namespaces.append(namespace)
        _require(_ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace))
        _require(_ip("link", "set", outer, "master", f"hb{self._tag}", "up"))
        _require(_ip("-n", namespace, "address", "add", f"{address}/24", "dev", inner))
        for device in (inner, "lo"):
            _require(_ip("-n", namespace, "link", "set", device, "up"))
        return self._start(address, outer, f"--address={self.address}", namespace=namespace)

    def _start(self, address: str, cable: str | None, *arguments: str, namespace: str | None = None) -> Node:
        command = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts"]
        inside = [] if namespace is None else ["ip", "netns", "exec", namespace]
        common = [
            f"--node-ip-address={address}",
            "--num-cpus=4",
            "--object-store-memory=100000000",
            "--block",
            "--disable-usage-stats",
        ]
        for _ in range(_TRIES):
            # Ray gives up nodes that start slowly, as on a busy machine, so a start is repeated.
            with tempfile.TemporaryFile() as output:
                process = subprocess.Popen(
                    [*inside, *command, "start", *arguments, *common], stdout=output, stderr=subprocess.STDOUT
                )
                node = Node(process, address, cable)
                while process.poll() is None:
                    if b"Ray runtime started" in _read(output):
                        return node
                    time.sleep(0.1)
                last_lines = _read(output)[-2_000:].decode(errors="replace")
            node.kill()
        raise OSError(f"a node does not start: {last_lines}")


def _read(file: IO[bytes]) -> bytes:
    return os.pread(file.fileno(), 1 << 20, 0)


def _ip(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False)


def _require(done: subprocess.CompletedProcess[bytes]) -> None:
    if done.returncode:
        raise OSError(f"{' '.join(done.args)}: {done.stderr.decode().strip()}")


def _find_own_address() -> str:
    return str(ray.util.get_node_ip_address())


def _find_free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
