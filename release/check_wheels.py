"""Check the wheels in a folder, and install and test those that this machine can run.

    python release/check_wheels.py dist [--python python3.12 ...] [--tests]

Every wheel must be tagged cp311-abi3 and contain the native module and the licences of Zstandard and LZ4. A wheel for
this platform is installed into a clean environment of every Python version that is found, and release/smoke.py runs
there with an empty PATH. With --tests, some tests of the source distribution run there, too.
The last lines say which wheels were tested and which were only inspected.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TESTS = ("tests/contract/test_codecs.py", "tests/unit/test_compressed_memory.py", "tests/unit/store")
"""Tests that need neither torch nor a framework."""
REQUIRED_FILES = (
    r"holdall/_native(\.abi3)?\.(so|pyd)",
    r"holdall/_native\.pyi",
    r"holdall/py\.typed",
    r"holdall-[^/]*\.dist-info/licenses/LICENSE",
    r"holdall-[^/]*\.dist-info/licenses/third_party/zstandard/LICENSE",
    r"holdall-[^/]*\.dist-info/licenses/third_party/lz4/LICENSE",
)


class WheelError(Exception):
    """A wheel has a wrong name or wrong contents."""


def inspect(wheel: Path) -> None:
    """Check the name and the contents of a wheel."""
    if "-cp311-abi3-" not in wheel.name:
        raise WheelError(f"{wheel.name} is not tagged cp311-abi3")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    for pattern in REQUIRED_FILES:
        found = [name for name in names if re.fullmatch(pattern, name)]
        if len(found) != 1:
            raise WheelError(f"{wheel.name} has {found} for {pattern}, and should have one file")
    sources = [name for name in names if name.endswith((".c", ".h"))]
    if sources:
        raise WheelError(f"{wheel.name} contains sources: {sources}")


def can_run_here(wheel: Path) -> bool:
    """Return whether this machine can load the native module of a wheel."""
    # The platform is, for example, linux-x86_64, macosx-11.0-arm64 or win-amd64.
    system, *_, machine = sysconfig.get_platform().split("-")
    platform = wheel.name.removesuffix(".whl").split("-")[-1]
    return system in platform and platform.endswith(machine)


def run_wheel(python: str, wheel: Path, tests: bool) -> str:
    """Install a wheel into a clean environment of `python` and run it. Return the line that smoke.py prints."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = Path(folder, "Scripts" if os.name == "nt" else "bin", "python")
        pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        wanted = [str(wheel), *(["pytest", "pytest-timeout", "hypothesis"] if tests else [])]
        subprocess.run([*pip, *wanted], check=True)
        bare = {name: text for name, text in os.environ.items() if name not in {"PATH", "PYTHONPATH", "CC"}}
        command = [str(inside), str(ROOT / "release" / "smoke.py")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=bare, cwd=folder)
        if tests:
            # The tests of the source distribution belong to the wheel. The tests of the working tree may be newer.
            (archive,) = wheel.parent.glob("holdall-*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
            suite = [str(inside), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
            tree = Path(folder, archive.name.removesuffix(".tar.gz"))
            subprocess.run(suite, check=True, env=bare, cwd=tree, stdout=subprocess.DEVNULL)
        return done.stdout.strip()


def find_pythons() -> list[str]:
    """Return one working Python of every version. The versions of pyenv are not in PATH."""
    found: dict[str, str] = {}
    kept = Path.home() / ".pyenv" / "versions"
    for python in (*PYTHONS, *map(str, sorted(kept.glob("3.1[1-9].*/bin/python")))):
        if shutil.which(python):
            command = [python, "-c", "import sys; print(sys.version_info[:2])"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                found.setdefault(done.stdout, python)
    return list(found.values())


def main() -> None:
    """Check every wheel of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", help="test with this Python only; may be repeated")
    parser.add_argument("--tests", action="store_true", help="also run tests of the suite with the wheel")
    given = parser.parse_args()
    wheels = sorted(given.folder.resolve().glob("holdall-*.whl"))
    if not wheels:
        raise WheelError(f"there is no wheel in {given.folder}")
    for wheel in wheels:
        inspect(wheel)
        if not can_run_here(wheel):
            print(f"{wheel.name}: inspected, not run on this machine", flush=True)
            continue
        for python in given.python or find_pythons():
            print(f"{wheel.name}: {run_wheel(python, wheel, given.tests)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (WheelError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
