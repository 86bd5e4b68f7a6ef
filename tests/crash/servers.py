"""Servers for the tests, on free ports of this machine.

A server that is not installed, or does not start, raises `MissingServerError`.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "holdall"
SECRET = "holdall-secret"


class MissingServerError(Exception):
    """A server is not installed or does not start."""


def find_free_ports(count: int) -> list[int]:
    """Return free ports. The ports 10,000 above them, which SeaweedFS also uses, are free, too.

    All of them are below 32,768, because the system gives higher ports to clients.
    """
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + secrets.randbelow(2_700)
        if port not in found and all(_is_free(one) for one in (port, port + 10_000)):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_for(port: int, process: subprocess.Popen[Any], seconds: float = 60) -> None:
    """Wait until `process` accepts connections on `port`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MissingServerError(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise MissingServerError("the server did not start in time")


def find_program(name: str) -> str:
    """Return the path of a program in the folder of this Python or in PATH."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise MissingServerError(f"{name} is not installed")
    return found


class Weed:
    """SeaweedFS: a real S3 server, which checks signatures and conditions. It can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        identity = {
            "name": KEY,
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        for tries_left in (2, 1, 0):  # Another process may use a port first.
            self._ports = find_free_ports(4)
            self._data = folder / f"data{tries_left}"
            self._data.mkdir()
            try:
                self.process = self._start()
                break
            except MissingServerError:
                if tries_left == 0:
                    raise

    def _start(self) -> subprocess.Popen[bytes]:
        master, volume, filer, s3 = self._ports
        arguments = [
            find_program("weed"),
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={self._data}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.config={self._folder / 's3.json'}",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            "-volume.max=20",
            "-master.volumeSizeLimitMB=256",
        ]
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
        """Environment variables for obstore."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self._ports[3]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def kill(self) -> None:
        """Kill the server."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Start the server again, with its data."""
        self.process = self._start()


@contextlib.contextmanager
def run_seaweed(folder: Path) -> Iterator[Weed]:
    """Run SeaweedFS."""
    server = Weed(folder)
    try:
        yield server
    finally:
        server.kill()


AZURITE_PORT = 10_000
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The published key of all emulators."""


@contextlib.contextmanager
def run_azurite(folder: Path, container: str) -> Iterator[dict[str, str]]:
    """Run Azure's emulator, with one container. Its port is fixed, because its clients support no other."""
    if not _is_free(AZURITE_PORT):
        raise MissingServerError(f"port {AZURITE_PORT} is taken")
    arguments = [
        find_program("azurite-blob"),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(AZURITE_PORT),
        "--location",
        str(folder),
        "--disableTelemetry",
        "--silent",
        "--skipApiVersionCheck",
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(AZURITE_PORT, process)
        _make_container(container)
        yield {"AZURE_STORAGE_USE_EMULATOR": "true"}
    finally:
        process.kill()
        process.wait()


def _make_container(name: str) -> None:
    date = email.utils.formatdate(usegmt=True)
    version = "2021-08-06"
    account = "devstoreaccount1"
    signed = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{account}/{account}/{name}\nrestype:container"
    )
    digest = hmac.new(base64.b64decode(_AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
    connection = http.client.HTTPConnection("127.0.0.1", AZURITE_PORT)
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {account}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    connection.request("PUT", f"/{account}/{name}?restype=container", headers=headers)
    answer = connection.getresponse()
    connection.close()
    if answer.status != 201:
        raise MissingServerError(f"no container could be made: {answer.status}")


@contextlib.contextmanager
def run_google_emulator(bucket: str) -> Iterator[dict[str, str]]:
    """Run moto with a translation to Google's dialect, and one bucket."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise MissingServerError("moto is not installed")
    (port,) = find_free_ports(1)
    shim = Path(__file__).with_name("google_over_moto.py")
    process = subprocess.Popen([sys.executable, shim, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{bucket}")
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            raise MissingServerError(f"no bucket could be made: {status}")
        account = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True}
        keys = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        yield {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account | keys), "GOOGLE_ALLOW_HTTP": "true"}
    finally:
        process.kill()
        process.wait()


class Forgetful(ThreadingHTTPServer):
    """A server with the part of S3 that a save needs. It ignores conditions, as some servers do."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ForgetfulHandler)
        self.objects: dict[str, bytes] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for obstore."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


_NAMED = {"ETag": '"1"', "Last-Modified": "Mon, 02 Nov 2026 00:00:00 GMT"}


class _ForgetfulHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Forgetful

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self._key] = content
        self._answer(200, b"", _NAMED)

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._key, None)
        self._answer(204, b"", {})

    @property
    def _key(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        if "list-type" in query:
            self._list(url.path.strip("/"), query.get("prefix", [""])[0])
            return
        content = self.server.objects.get(self._key)
        if content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        byte_range = self.headers.get("Range")
        if byte_range is None:
            self._answer(200, content, _NAMED)
            return
        first, last = (int(end) for end in byte_range.removeprefix("bytes=").split("-"))
        piece = content[first : last + 1]
        span = {"Content-Range": f"bytes {first}-{first + len(piece) - 1}/{len(content)}"}
        self._answer(206, piece, _NAMED | span)

    def do_POST(self) -> None:
        bucket = urllib.parse.urlsplit(self.path).path.strip("/")
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", asked)
        for key in keys:
            self.server.objects.pop(f"/{bucket}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {"Content-Type": "application/xml"})

    def _list(self, bucket: str, prefix: str) -> None:
        start = f"/{bucket}/"
        entries = "".join(
            f"<Contents><Key>{key.removeprefix(start)}</Key><Size>{len(content)}</Size><ETag>1</ETag>"
            "<LastModified>2026-11-02T00:00:00.000Z</LastModified></Contents>"
            for key, content in sorted(self.server.objects.items())
            if key.startswith(start + prefix)
        )
        body = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
