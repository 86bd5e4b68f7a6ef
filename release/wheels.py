"""Build the source distribution and a wheel for every platform, on one Linux machine: `make wheels`.

    python release/wheels.py [--target linux-x86_64 ...] [--out dist]

In:  release/build.txt, which names the compiler and the sources of Zstandard and LZ4, with hashes.
Out: holdall-VERSION.tar.gz and one wheel a target. The wheels are built from the source distribution, so that it is
complete, and so that the working tree keeps the library that was built for this machine.
Then release/check_wheels.py checks every wheel, and installs and tests those that this machine can run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "wheels"
TOOLS = ("hatchling", "auditwheel", "delocate", "delvewheel")
PINNED = ["-c", str(ROOT / "constraints.txt")]


def run(*command: str | Path, cwd: Path = ROOT, **settings: str) -> None:
    """Run a command with these environment variables; end if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=os.environ | settings, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} exited with {done.returncode}")


def python_with_tools() -> Path:
    """Return a Python that has the compiler and the checkers; made once, and again when release/build.txt changes."""
    python, stamp = CACHE / "venv" / "bin" / "python", CACHE / "stamp"
    wanted = (ROOT / "release" / "build.txt").read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(CACHE / "venv", with_pip=True, clear=True)
    files = CACHE / "files"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", *PINNED, "pip", *TOOLS)
    sources = ("--no-binary", "zstandard,lz4")
    run(*pip, "download", "--quiet", "--no-deps", "--require-hashes", *sources, "-r", "release/build.txt", "-d", files)
    run(*pip, "install", "--quiet", "--no-index", "--find-links", files, "ziglang")
    for name in ("zstandard", "lz4"):
        unpack(next(files.glob(f"{name}-*.tar.gz")), CACHE / "compression", name)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def unpack(archive: Path, folder: Path, name: str) -> Path:
    """Unpack a source distribution to `folder`/`name`; its own folder's name has a version in it."""
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            member.name = str(Path(name, *Path(member.name).parts[1:]))
            opened.extract(member, folder, filter="data")
    return folder / name


def build(targets: list[str], out: Path) -> None:
    """Build the source distribution, and from it a wheel for every target."""
    for old in (*out.glob("holdall-*.whl"), *out.glob("holdall-*.tar.gz")):
        old.unlink()
    hatchling = (sys.executable, "-m", "hatchling", "build")
    run(*hatchling, "-t", "sdist", "-d", out)
    with tempfile.TemporaryDirectory() as scratch:
        tree = unpack(next(out.glob("holdall-*.tar.gz")), Path(scratch), "holdall")
        for target in targets:
            print(f"{target}: building", flush=True)
            settings = {"HOLDALL_BUILD_TARGET": target, "HOLDALL_BUILD_COMPRESSION": str(CACHE / "compression")}
            run(*hatchling, "-t", "wheel", "-d", out, cwd=tree, **settings)


def main() -> None:
    """Build what was asked for, and check it, with the Python that has the tools."""
    if Path(sys.prefix) != CACHE / "venv":
        python = python_with_tools()
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(0, str(ROOT))
    targets = importlib.import_module("hatch_build").TARGETS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=sorted(targets), help="this wheel alone; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    build(given.target or list(targets), out)
    run(sys.executable, ROOT / "release" / "check_wheels.py", out, "--tests")


if __name__ == "__main__":
    main()
