"""Rehearse a release with a package index on this machine: `make rehearsal`, after `make wheels`.

Upload the files of dist with twine to pypiserver; install holdall from it into a clean environment; run
release/smoke.py and the README's programs there; then yank the release, and see that pip no longer chooses it, and that
who pins it still gets it. Dependencies come from where pip finds them. Nothing leaves the machine.
Out: a line a step, with its seconds.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, fails: bool = False, cwd: Path = ROOT) -> str:
    """Run a command, and end unless it succeeds, or fails where it should. Return what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if bool(done.returncode) != fails:
        sys.exit(f"error: {' '.join(words)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print a step and how long it took."""
    begun = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


def environment(folder: Path, *packages: str) -> tuple[str | Path, ...]:
    """Make an environment with these packages. Return its pip."""
    venv.create(folder, with_pip=True, clear=True)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", *packages)
    return pip


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def index_server(tools: Path, kept: Path) -> Iterator[str]:
    """Run pypiserver for a folder. Yield its address."""
    port = free_port()
    command = [tools / "bin" / "pypi-server", "run", "-i", "127.0.0.1", "-p", str(port), "-P", ".", "-a", ".", kept]
    server = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def yanked_index(kept: Path, folder: Path) -> Iterator[str]:
    """Serve the same files as a yanked release. Pypiserver cannot yank."""
    page = folder / "simple" / "holdall"
    page.mkdir(parents=True)
    links = []
    for file in sorted(kept.iterdir()):
        (page / file.name).symlink_to(file)
        links.append(f'<a href="{file.name}" data-yanked="a rehearsal">{file.name}</a>')
    (page / "index.html").write_text("<!DOCTYPE html>" + "<br>".join(links), encoding="utf-8")
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def try_it(python: Path, folder: Path) -> None:
    """Run what a new user runs: the smoke test, and the README's programs."""
    print(run(python, ROOT / "release" / "smoke.py", cwd=folder).strip())
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    (folder / "readme.py").write_text("\n".join(programs), encoding="utf-8")
    print(run(python, "readme.py", cwd=folder).strip())


def main() -> None:
    """Rehearse it all."""
    os.environ.pop("PYTHONPATH", None)
    files = [str(file) for file in (ROOT / "dist").glob("holdall-*") if file.suffix in {".whl", ".gz"}]
    if len(files) < 2:
        sys.exit("error: dist has no source distribution with a wheel; run `make wheels` first")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept = Path(scratch, "kept")
        kept.mkdir()
        with step("environments, and the dependencies of holdall"):
            environment(folder / "tools", "pypiserver", "twine")
            pip = environment(folder / "clean", *PROJECT["dependencies"])
        with index_server(folder / "tools", kept) as address:
            with step(f"upload {len(files)} files"):
                upload = ("upload", "--non-interactive", "-u", "a", "-p", "b", "--repository-url", address)
                run(folder / "tools" / "bin" / "twine", "check", "--strict", *files)
                run(folder / "tools" / "bin" / "twine", *upload, *files)
            alone = ("install", "--quiet", "--no-deps", "--no-cache-dir", "--force-reinstall", "--index-url")
            with step("install holdall, and run the smoke test and the README's programs"):
                run(*pip, *alone, f"{address}/simple", "holdall")
                try_it(folder / "clean" / "bin" / "python", folder)
        with step("yank"), yanked_index(kept, folder / "yanked") as address:
            run(*pip, "uninstall", "--quiet", "--yes", "holdall")
            run(*pip, *alone, address, "holdall", fails=True)
            run(*pip, *alone, address, f"holdall=={PROJECT['version']}")


if __name__ == "__main__":
    main()
