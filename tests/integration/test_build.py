"""The build of the native module: sources without warnings, a complete source distribution, clear errors."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall import _native

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "holdall" / "_native"
THIRD_PARTY = ROOT / "third_party"

needs_a_build = pytest.mark.skipif(not THIRD_PARTY.exists(), reason="needs third_party/, which `make setup` fetches")


@pytest.fixture(scope="module")
def setup_script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.nightly
@needs_a_build
def test_the_c_sources_compile_without_a_warning() -> None:
    """Compiling takes seconds, so the result is kept until a source, a flag or the compiler changes."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    includes = [
        sysconfig.get_paths()["include"],
        np.get_include(),
        *(str(THIRD_PARTY / name) for name in ("zstandard", "lz4")),
    ]
    command = [compiler, "-O3", "-std=c11", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c", "-o", os.devnull]
    command += [word for include in includes for word in ("-isystem", include)]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    headers = b"".join(header.read_bytes() for header in sorted(SOURCES.glob("*.h")))
    for source in sorted(SOURCES.glob("*.c")):
        key = hashlib.sha256(repr(command).encode() + version + headers + source.read_bytes()).hexdigest()
        stamp = ROOT / ".cache" / "compiled" / f"{source.stem}-{key[:16]}"
        if stamp.exists():
            continue
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def test_the_module_exports_no_function_of_zstandard_or_lz4() -> None:
    """Another library in the same process may have its own versions of them."""
    if shutil.which("nm") is None or sys.platform != "linux":
        pytest.skip("needs nm on Linux")
    command = ["nm", "--dynamic", "--defined-only", _native.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert "PyInit__native" in names
    assert not [name for name in names if not name.startswith(("PyInit__native", "holdall_"))]


# ---------------------------------------------------------------- sources of Zstandard and LZ4


def copy_tree(to: Path) -> Path:
    """Copy the files that a build needs, without built files."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("src", "tests", "third_party"):
        shutil.copytree(ROOT / name, to / name, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, to)
    shutil.copy(ROOT / "constraints.txt", to)
    return to


def run_setup(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py in such a way that pip finds no package."""
    settings = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""} | environment
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=tree, env=settings, capture_output=True, text=True, check=False)


def make_fake_pip(archives: Path, calls: list[list[str]]) -> Any:
    """Return a `subprocess.run` that "downloads" small archives instead of running pip."""

    def run(command: list[str], *, env: dict[str, str], check: bool) -> None:
        assert check
        # These variables would apply to the build tools of the packages, too.
        assert not {"PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"} & env.keys()
        calls.append(command)
        to = Path(command[command.index("--dest") + 1])
        for archive in archives.iterdir():
            shutil.copy(archive, to)

    return run


@pytest.fixture
def archives(setup_script: dict[str, Any], tmp_path: Path) -> Path:
    folder = tmp_path / "archives"
    folder.mkdir()
    for package, files in setup_script["THIRD_PARTY_FILES"].items():
        tree = tmp_path / f"{package}-1.0"
        for file in files:
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_text("/*\n   A licence.\n*/\nint code;\n")
        with tarfile.open(folder / f"{package}-1.0.tar.gz", "w:gz") as opened:
            opened.add(tree, tree.name)
    return folder


def test_sources_are_downloaded_once_and_again_when_their_versions_change(
    setup_script: dict[str, Any], archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", make_fake_pip(archives, calls))
    fetch = setup_script["fetch_third_party"]
    versions = tmp_path / "versions.txt"
    folder = tmp_path / "third_party"
    for content, expected_calls in (("one", 1), ("one", 1), ("two", 2)):
        versions.write_text(content)
        fetch(folder, versions)
        assert len(calls) == expected_calls
    assert "--require-hashes" in calls[0]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    lz4 = ["lz4/lz4.c", "lz4/lz4.h", "lz4/lz4hc.c", "lz4/lz4hc.h"]
    zstandard = ["zstandard/zstd.c", "zstandard/zstd.h", "zstandard/zstd_errors.h"]
    assert names == [*lz4, "versions.txt", *zstandard]
    assert (folder / "lz4" / "LICENSE").read_text().strip() == "A licence."


def test_a_failed_download_creates_no_folder(
    setup_script: dict[str, Any], archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that exists is taken to be complete."""
    (archives / "lz4-1.0.tar.gz").write_bytes(b"not an archive")
    monkeypatch.setattr(subprocess, "run", make_fake_pip(archives, []))
    versions = tmp_path / "versions.txt"
    versions.touch()
    with pytest.raises(tarfile.TarError):
        setup_script["fetch_third_party"](tmp_path / "third_party", versions)
    assert not (tmp_path / "third_party").exists()


def test_every_source_has_a_pinned_version_and_hash(setup_script: dict[str, Any]) -> None:
    lines = (SOURCES / "third_party.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in pinned)
    assert {line.split("==")[0] for line in pinned} == set(setup_script["THIRD_PARTY_FILES"])


# ---------------------------------------------------------------- results of the build


@needs_a_build
def test_the_error_of_a_missing_compiler_names_it(tmp_path: Path) -> None:
    done = run_setup(copy_tree(tmp_path), "build_clib", CC="no-such-compiler")
    assert done.returncode != 0
    assert "no-such-compiler" in done.stderr
    assert "needs a working C compiler" in done.stderr


@needs_a_build
def test_the_source_distribution_contains_all_sources(tmp_path: Path) -> None:
    done = run_setup(copy_tree(tmp_path), "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("holdall-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = [*SOURCES.iterdir(), *THIRD_PARTY.rglob("*.*"), *THIRD_PARTY.glob("*/LICENSE"), *ROOT.glob("tests/*.py")]
    assert not {str(path.relative_to(ROOT)) for path in wanted} - names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@needs_a_build
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_wheel_is_built_without_a_network_and_works(tmp_path: Path) -> None:
    """It runs on every Python from 3.11 on, contains the licences of Zstandard and LZ4, and no C sources."""
    tree = copy_tree(tmp_path / "tree")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"PIP_NO_INDEX": "1"}
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(tree)], env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(installed)
    names = {str(path.relative_to(installed)) for path in installed.rglob("*")}
    licences = {f"licenses/{name}LICENSE" for name in ("", "third_party/zstandard/", "third_party/lz4/")}
    assert licences <= {name.partition(".dist-info/")[2] for name in names}
    assert not [name for name in names if name.endswith((".c", ".h"))]
    smoke = [sys.executable, str(ROOT / "release" / "smoke.py")]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(smoke, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "rows right" in done.stdout
