"""Rehearse a release with a package index on this machine: `make rehearsal`, after `make wheels`.

The script uploads the files of dist with twine to pypiserver, and installs holdall from it into a clean environment.
There it runs release/smoke.py and the README's programs. Then it yanks the release, and checks that pip no longer
chooses it and still installs it for a pinned version. Dependencies are installed as usual. Nothing is sent to the
real index. The script prints a line for each step, with its seconds.
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
    """Run a command, and return its output. End this script if the command fails, or succeeds in spite of `fails`."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if bool(done.returncode) != fails:
        sys.exit(f"error: {' '.join(words)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print the name of a step and its seconds."""
    begun = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


def make_environment(folder: Path, *packages: str) -> tuple[str | Path, ...]:
    """Make an environment with `packages`. Return the command of its pip."""
    venv.create(folder, with_pip=True, clear=True)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", *packages)
    return pip


def find_free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def run_index(tools: Path, kept: Path) -> Iterator[str]:
    """Run pypiserver for a folder. Yield its address."""
    port = find_free_port()
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
def run_yanked_index(kept: Path, folder: Path) -> Iterator[str]:
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


def run_first_programs(python: Path, folder: Path) -> None:
    """Run the smoke test and the README's programs."""
    print(run(python, ROOT / "release" / "smoke.py", cwd=folder).strip())
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    (folder / "readme.py").write_text("\n".join(programs), encoding="utf-8")
    print(run(python, "readme.py", cwd=folder).strip())


def main() -> None:
    """Rehearse all steps of a release."""
    os.environ.pop("PYTHONPATH", None)
    files = [str(file) for file in (ROOT / "dist").glob("holdall-*") if file.suffix in {".whl", ".gz"}]
    if len(files) < 2:
        sys.exit("error: dist has no source distribution with a wheel; run `make wheels` first")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept = Path(scratch, "kept")
        kept.mkdir()
        with step("environments, and the dependencies of holdall"):
            make_environment(folder / "tools", "pypiserver", "twine")
            pip = make_environment(folder / "clean", *PROJECT["dependencies"])
        with run_index(folder / "tools", kept) as address:
            with step(f"upload {len(files)} files"):
                upload = ("upload", "--non-interactive", "-u", "a", "-p", "b", "--repository-url", address)
                run(folder / "tools" / "bin" / "twine", "check", "--strict", *files)
                run(folder / "tools" / "bin" / "twine", *upload, *files)
            alone = ("install", "--quiet", "--no-deps", "--no-cache-dir", "--force-reinstall", "--index-url")
            with step("install holdall, and run the smoke test and the README's programs"):
                run(*pip, *alone, f"{address}/simple", "holdall")
                run_first_programs(folder / "clean" / "bin" / "python", folder)
        with step("yank"), run_yanked_index(kept, folder / "yanked") as address:
            run(*pip, "uninstall", "--quiet", "--yes", "holdall")
            run(*pip, *alone, address, "holdall", fails=True)
            run(*pip, *alone, address, f"holdall=={PROJECT['version']}")


if __name__ == "__main__":
    main()
