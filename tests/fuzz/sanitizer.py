"""A build of the native module in which the compiler checks every memory access and every sum."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import holdall
from holdall import _native

ROOT = Path(__file__).parents[2]
_THIRD_PARTY = ROOT / "third_party"
_OPTIONS = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096"
"""Leaks are not reported, because Python never frees some objects. Large allocations fail."""


def copy_package(folder: Path) -> Path:
    """Copy holdall without its native module to `folder`. Return the copy."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    return shutil.copytree(Path(holdall.__file__).parent, folder / "src" / "holdall", ignore=unwanted)


def build_sanitized(package: Path) -> dict[str, str]:
    """Build the native module of a copy of holdall with AddressSanitizer and UndefinedBehaviorSanitizer.

    Return the environment in which Python imports the copy. Skip the test if that cannot be built here.
    """
    compiler = shutil.which("gcc")
    if compiler is None or not _THIRD_PARTY.exists():
        pytest.skip("needs gcc and third_party/, which `make setup` fetches")
    libraries = sorted(path for path in _THIRD_PARTY.iterdir() if path.is_dir())
    includes = [sysconfig.get_paths()["include"], np.get_include(), *map(str, libraries)]
    command = [compiler, "-fsanitize=address", "-O1", "-g", "-std=c11", "-fPIC"]
    command += [f"-I{folder}" for folder in includes]
    for source in _THIRD_PARTY.glob("*/*.c"):
        compiled = subprocess.run([*command, "-c", str(source), "-o", str(package / f"{source.stem}.o")], check=False)
        if compiled.returncode != 0:
            pytest.skip("this compiler has no sanitizers")
    files = [str(path) for path in sorted([*(package / "_native").glob("*.c"), *package.glob("*.o")])]
    command += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-shared", *files]
    subprocess.run([*command, "-o", str(package / Path(_native.__file__).name)], check=True)
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": _OPTIONS,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(package.parent),
    }
