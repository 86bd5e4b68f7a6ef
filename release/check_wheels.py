"""Check the wheels in a folder, and install and test those that this machine can run.

    python release/check_wheels.py dist [--python python3.12 ...] [--tests] [--run-only | --source-only]

Every wheel: its tags agree with its name; the library and the licences of what is linked into it are there; it needs
nothing but the system's own C library. auditwheel judges the tags of Linux wheels; delvewheel lists what a Windows
library needs; delocate's list needs a Mac, so macholib, which it is built on, reads the Mac libraries.
A wheel that this machine runs is installed into a clean environment for every Python that is found, with an empty PATH
and without the system's Zstandard and LZ4, and release/smoke.py runs there. With --tests, so do tests of the suite.
The source distribution is installed without a compiler in PATH: once pip fetches one, once nothing is compiled.
The last lines say what was tested and what was only built.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.executable).parent
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TESTS = ("tests/contract/test_codecs.py", "tests/contract/test_kernels.py", "tests/unit/test_sealed_memory.py",
         "tests/unit/native/test_thread_pool.py")  # fmt: skip
"""They need neither torch nor a framework."""
LICENCES = {"holdall/native/LICENSE.zstd.txt", "holdall/native/LICENSE.lz4.txt"}
SYSTEM = re.compile(r"(?i)^(/usr/lib/libSystem\.B\.dylib|KERNEL32\.dll|api-ms-win-crt-.*\.dll|ucrtbase\.dll)$")


class WheelError(Exception):
    """A wheel is not what its name says."""


def require(holds: bool, message: str) -> None:
    """Raise if a rule is broken; `assert` is switched off by -O."""
    if not holds:
        raise WheelError(message)


def contents(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel, check what it has to have, and return its library."""
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        opened.extractall(folder)
    libraries = [name for name in names if name.startswith("holdall/native/_kernels.")]
    require(len(libraries) == 1, f"{wheel.name} has {libraries} for a library")
    lacking = LICENCES - names
    require(not lacking, f"{wheel.name} lacks {lacking}")
    (record,) = folder.glob("*.dist-info/WHEEL")
    tags = re.findall(r"^Tag: py3-none-(.*)$", record.read_text(encoding="utf-8"), re.MULTILINE)
    named = wheel.name.removesuffix(".whl").split("-")[-1].split(".")
    require(sorted(tags) == sorted(named), f"{wheel.name} is tagged {tags}")
    return folder / libraries[0]


def check_linux(wheel: Path) -> str:
    """Let auditwheel judge the tag."""
    command = [str(TOOLS / "python"), "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (tag,) = re.findall(r'following platform\s+tag:\s+"(\w+)"', done.stdout)
    require(tag in wheel.name, f"auditwheel gives {wheel.name} the tag {tag}")
    return f"auditwheel: {tag}"


def check_macos(library: Path) -> str:
    """Read what the library loads, and whether it is signed, which Apple's own processors ask for."""
    from macholib.MachO import MachO  # noqa: PLC0415  # only with the tools of `make wheels`

    (header,) = MachO(str(library)).headers
    needed = [text for _, name, text in header.walkRelocatables() if name == "load_dylib"]
    require(bool(needed) and all(SYSTEM.match(name) for name in needed), f"{library.name} needs {needed}")
    kinds = {command[0].get_cmd_name() for command in header.commands}
    require("arm64" not in str(library.parents[2]) or "LC_CODE_SIGNATURE" in kinds, f"{library.name} is not signed")
    return f"macholib: needs {', '.join(needed)}"


def check_windows(library: Path) -> str:
    """Let delvewheel list what the library loads."""
    command = [str(TOOLS / "python"), "-m", "delvewheel", "needed", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    needed = done.stdout.split()
    require(bool(needed) and all(SYSTEM.match(name) for name in needed), f"{library.name} needs {needed}")
    return f"delvewheel: needs {len(needed)} libraries, all of the system"


def runs_here(wheel: Path) -> bool:
    """Tell whether this machine can load the library of a wheel."""
    here = {"Linux": "manylinux", "Darwin": "macosx", "Windows": "win"}.get(platform.system(), "none")
    return here in wheel.name and f"{platform.machine().lower()}.whl" in wheel.name.lower()


def test_in(python: str, wheel: Path, tests: bool) -> str:
    """Install a wheel into a clean environment of this Python and run it; return the line that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = Path(folder, "Scripts" if os.name == "nt" else "bin", "python")
        pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        wanted = [str(wheel), *(["pytest", "pytest-timeout", "hypothesis"] if tests else [])]
        subprocess.run([*pip, *wanted], check=True)
        bare = {name: text for name, text in os.environ.items() if name not in {"PATH", "PYTHONPATH", "CC"}}
        command = [str(inside), str(ROOT / "release" / "smoke.py"), "--linked"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=bare, cwd=folder)
        if tests:
            # Those of the source distribution: the working tree may have gone on since the wheel was built.
            (archive,) = wheel.parent.glob("holdall-*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
            suite = [str(inside), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
            tree = Path(folder, archive.name.removesuffix(".tar.gz"))
            subprocess.run(suite, check=True, env=bare, cwd=tree, stdout=subprocess.DEVNULL)
        return done.stdout.strip()


def test_source(archive: Path, portable: bool) -> str:
    """Install the source distribution without a compiler in PATH, and run it; return the line that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        inside = Path(folder, "Scripts" if os.name == "nt" else "bin", "python")
        bare = {name: text for name, text in os.environ.items() if name not in {"PYTHONPATH", "CC"}}
        bare |= {"PATH": folder, "HOLDALL_BUILD_PORTABLE": str(int(portable))}
        command = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(archive)]
        subprocess.run(command, check=True, env=bare)
        command = [str(inside), str(ROOT / "release" / "smoke.py")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=bare, cwd=folder)
        expected = "portable loops" if portable else "native loops"
        require(expected in done.stdout, f"{archive.name} gives {done.stdout}")
        require(("HOLDALL_BUILD_PORTABLE is set" in done.stderr) == portable, f"the warning is: {done.stderr}")
        return done.stdout.strip()


def main() -> None:
    """Check every wheel of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", help="test with this one; default: every one from 3.11 on")
    parser.add_argument("--run-only", action="store_true", help="only install and test what runs here")
    parser.add_argument("--source-only", action="store_true", help="only install the source distribution")
    parser.add_argument("--tests", action="store_true", help="run tests of the suite against the wheel, too")
    given = parser.parse_args()
    wheels = [] if given.source_only else sorted(given.folder.glob("holdall-*.whl"))
    require(given.source_only or bool(wheels), f"there is no wheel in {given.folder}")
    if not given.run_only:
        inspect(wheels)
    for wheel in wheels:
        if not runs_here(wheel):
            print(f"{wheel.name}: only built, not run", flush=True)
            continue
        for python in given.python or pythons():
            print(f"{wheel.name}: {test_in(python, wheel, given.tests)}", flush=True)
    for archive in [] if given.run_only else given.folder.glob("holdall-*.tar.gz"):
        for portable in (False, True):
            print(f"{archive.name}, no compiler: {test_source(archive, portable)}", flush=True)


def inspect(wheels: list[Path]) -> None:
    """Check what can be read from wheels without running them."""
    for wheel in wheels:
        with tempfile.TemporaryDirectory(suffix=wheel.name) as folder:
            library = contents(wheel, Path(folder))
            if library.suffix == ".so":
                found = check_linux(wheel)
            else:
                found = (check_macos if library.suffix == ".dylib" else check_windows)(library)
        print(f"{wheel.name}: {found}", flush=True)


def pythons() -> list[str]:
    """Return every Python that works, one a version; those of pyenv are not in PATH."""
    found: dict[str, str] = {}
    kept = Path.home() / ".pyenv" / "versions"
    for python in (*PYTHONS, *map(str, sorted(kept.glob("3.1[1-9].*/bin/python")))):
        if shutil.which(python):
            command = [python, "-c", "import sys; print(sys.version_info[:2])"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                found.setdefault(done.stdout, python)
    return list(found.values())


if __name__ == "__main__":
    try:
        main()
    except (WheelError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
