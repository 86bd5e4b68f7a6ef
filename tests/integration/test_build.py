"""The build hook: the C loops compile cleanly, and a machine without a compiler still gets a package."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from holdall.native import NativeKernels, open_library
from holdall.storage.blocks import Codec, Method, Predictor, Transform

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hatch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook(hatch_build: ModuleType, tmp_path: Path) -> Any:
    for number, source in enumerate(hatch_build.SOURCES):
        path = tmp_path / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'__attribute__((visibility("default"))) int answer_{number}(void) {{ return {number}; }}\n')
    return hatch_build.KernelBuildHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")


@pytest.fixture
def compiled_once(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of holdall's C takes a compiler seconds: what compiled is kept, and compiled again when anything changed.

    That is the compiler, its flags, this build hook, and every source and header beside the sources.
    """
    really = hatch_build.compile_shared
    hook_source = (ROOT / "hatch_build.py").read_bytes()

    def compile_shared(command: list[str], sources: list[Path], library: Path) -> str | None:
        if len(sources) != len(hatch_build.SOURCES):  # the small program that tries a compiler
            return really(command, sources, library)  # type: ignore[no-any-return]
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        content = hashlib.sha256(repr([command, version]).encode() + hook_source)
        for file in sorted({found for source in sources for found in source.parent.glob("*.[ch]")}):
            content.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
        kept = ROOT / ".cache" / "compiled" / f"{content.hexdigest()}{library.suffix}"
        if not kept.exists():
            problem: str | None = really(command, sources, kept)
            if problem is not None:
                return problem
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept, library)
        return None

    monkeypatch.setattr(hatch_build, "compile_shared", compile_shared)


def empty_build() -> dict[str, Any]:
    return {"artifacts": [], "pure_python": True}


@pytest.mark.usefixtures("compiled_once")
def test_the_c_loops_compile_without_a_warning(hatch_build: ModuleType, tmp_path: Path) -> None:
    compiler = hatch_build.system_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler, and this machine has none")
    strict = [*compiler, "-Wall", "-Wextra", "-Werror", "-pedantic"]
    problem = hatch_build.compile_shared(
        strict, [ROOT / source for source in hatch_build.SOURCES], tmp_path / "strict.so"
    )
    assert problem is None


def test_the_library_is_built_and_shipped_for_this_platform(hatch_build: ModuleType, hook: Any) -> None:
    if hatch_build.system_compiler() is None:
        pytest.skip("needs a C compiler, and this machine has none")
    build = empty_build()
    hook.initialize("standard", build)
    library = Path(hook.root, hatch_build.LIBRARY)
    built = ctypes.CDLL(str(library))
    assert [built[f"answer_{number}"]() for number in range(len(hatch_build.SOURCES))] == list(
        range(len(hatch_build.SOURCES))
    )
    assert build["artifacts"] == [hatch_build.LIBRARY.as_posix()]
    assert build["pure_python"] is False
    assert build["tag"].startswith("py3-none-")
    sources = [Path(hook.root, source) for source in hatch_build.SOURCES]
    beside = [source for source in sources if source.parent == library.parent]
    assert sorted(library.parent.iterdir()) == sorted([library, *beside])
    assert hook.dependencies() == []


def test_without_a_compiler_one_is_asked_for(
    hatch_build: ModuleType, hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build, "system_compiler", lambda: None)
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    assert hook.dependencies() == ["ziglang"]
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "vax")
    assert hook.dependencies() == []


@pytest.mark.usefixtures("compiled_once")
def test_the_compiler_that_pip_fetches_builds_a_library_that_works(
    hatch_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a compiler gets the same loops; slices go through the processor's own instructions, too."""
    if hatch_build.zig_compiler() is None:
        pytest.skip("needs the package ziglang, which `make test` installs")
    shutil.copytree(
        ROOT / hatch_build.FOLDER, tmp_path / hatch_build.FOLDER, ignore=shutil.ignore_patterns("_kernels*")
    )
    monkeypatch.setattr(hatch_build, "system_compiler", lambda: None)
    hook = hatch_build.KernelBuildHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    build = empty_build()
    hook.initialize("standard", build)
    assert build["artifacts"] == [hatch_build.LIBRARY.as_posix()]
    coder = NativeKernels(open_library(tmp_path / hatch_build.LIBRARY)).coder
    form = Transform(3 * 20 * 30, predictor=Predictor.LEFT, planes=3, rows=20, columns=30, interleaved=True, green=True)
    slices = np.random.default_rng(0).integers(0, 9, (5, form.slice_bytes), np.uint8)
    sealed = coder.seal(slices, Codec(Method.ZSTD, 3, form))
    assert sealed is not None
    out = np.zeros_like(slices)
    coder.decode(sealed, np.arange(5), out)
    assert out.tobytes() == slices.tobytes()


def test_without_any_compiler_the_wheel_is_pure_and_says_so(
    hatch_build: ModuleType, hook: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hatch_build, "system_compiler", lambda: None)
    monkeypatch.setattr(hatch_build, "zig_compiler", lambda: None)
    stale = Path(hook.root, hatch_build.LIBRARY)
    stale.write_bytes(b"of an older source")
    build = empty_build()
    hook.initialize("standard", build)
    reason = Path(hook.root, hatch_build.REASON)
    assert build == empty_build() | {"artifacts": [hatch_build.REASON.as_posix()]}
    assert not stale.exists()
    assert "no C compiler" in capsys.readouterr().err
    with pytest.raises(OSError, match="was not built: no C compiler"):
        open_library(stale)
    hook.clean([])
    assert not reason.exists()


def test_a_source_that_does_not_compile_is_a_warning(
    hatch_build: ModuleType, hook: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(hook.root, hatch_build.SOURCES[0]).write_text("not C")
    build = empty_build()
    hook.initialize("standard", build)
    assert build["pure_python"]
    assert "built without its compiled loops" in capsys.readouterr().err
    assert "exited with" in Path(hook.root, hatch_build.REASON).read_text(encoding="utf-8")


def test_a_target_that_does_not_compile_is_an_error(
    hatch_build: ModuleType, hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel for others is never left without its library."""
    monkeypatch.setenv("HOLDALL_BUILD_TARGET", "linux-aarch64")
    monkeypatch.setattr(hatch_build, "zig_compiler", lambda: None)
    with pytest.raises(RuntimeError, match="needs the package ziglang"):
        hook.initialize("standard", empty_build())
    monkeypatch.setattr(hatch_build, "zig_compiler", lambda: ["false"])
    with pytest.raises(RuntimeError, match="exited with 1"):
        hook.initialize("standard", empty_build())


@pytest.mark.parametrize("portable", ["0", "1"])
def test_make_setup_fails_where_nothing_was_compiled_unless_that_was_asked_for(tmp_path: Path, portable: str) -> None:
    """The Makefile's own recipe, with a Python whose pip installs nothing and whose holdall has no library."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("_kernels*", "__pycache__"))
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || PYTHONPATH={tmp_path}/src exec {sys.executable} "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    settings = os.environ | {"HOLDALL_BUILD_PORTABLE": portable}
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "setup"], env=settings, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (portable == "1"), done.stderr
    assert ("error: something is not compiled" in done.stderr) == (portable == "0")
    assert (tmp_path / ".venv" / ".stamp").exists() == (portable == "1")


def test_compression_is_linked_from_the_sources_given(hatch_build: ModuleType, tmp_path: Path) -> None:
    """The licences of what is linked in travel with the wheel."""
    for name in ("zstandard/zstd/LICENSE", "zstandard/zstd/zstd.c", "lz4/lz4libs/lz4.c", "lz4/lz4libs/lz4hc.c"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("/*\n   Its licence.\n*/\nint code;\n")
    flags, sources, licences = hatch_build.compression(tmp_path)
    assert "-DHOLDALL_COMPRESSION" in flags
    assert all(source.exists() for source in sources)
    assert sorted(licences.values()) == ["holdall/native/LICENSE.lz4.txt", "holdall/native/LICENSE.zstd.txt"]
    assert (tmp_path / "lz4.txt").read_text().strip() == "Its licence."
