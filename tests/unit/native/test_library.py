"""The loader: a library is used only if it agrees with the Python code, and exports nothing but its own names."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdall.native import library, native_library, open_library
from holdall.native.library import _SIGNATURES, _STRUCTS

FOLDER = Path(library.__file__).parents[1] / "_native"


def built_path() -> Path:
    return Path(native_library()._name)


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale build is not called with the wrong arguments; the reason names both versions."""
    version = library._VERSION
    monkeypatch.setattr(library, "_VERSION", version + 1)
    with pytest.raises(OSError, match=f"is of version {version}, and this is version {version + 1}"):
        open_library(built_path())


@pytest.mark.parametrize("struct", sorted(_STRUCTS))
def test_a_library_of_other_structs_is_refused(monkeypatch: pytest.MonkeyPatch, struct: str) -> None:
    """A field that moved, grew, or is missing on one side."""
    fields = list(_STRUCTS[struct]._fields_)
    wider = (fields[0][0], ctypes.c_int64 * 2)
    for changed in ([fields[1], fields[0], *fields[2:]], fields[:-1], [*fields, ("more", ctypes.c_int64)], [wider]):
        other = type("Other", (ctypes.Structure,), {"_fields_": changed})
        monkeypatch.setattr(library, "_STRUCTS", {**_STRUCTS, struct: other})
        with pytest.raises(OSError, match=rf"was built from other structs: {struct}\."):
            open_library(built_path())


def test_a_struct_that_only_one_side_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever side it is."""
    monkeypatch.setattr(library, "_STRUCTS", {name: _STRUCTS[name] for name in _STRUCTS if name != "names"})
    with pytest.raises(OSError, match=r"names\."):
        open_library(built_path())


def test_an_older_library_without_a_version_is_refused(tmp_path: Path) -> None:
    """Any other library, too."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, and this machine has none")
    source, other = tmp_path / "other.c", tmp_path / built_path().name
    source.write_text("int holdall_kernels_version(void) { return 8; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    with pytest.raises(OSError, match="is of another version"):
        open_library(other)


def test_every_exported_function_is_declared() -> None:
    """Each EXPORT in C has its types in the loader, and the other way round."""
    sources = "".join(path.read_text() for path in sorted(FOLDER.glob("*.c")))
    exported = set(re.findall(r"^EXPORT [^;{]*?\b(\w+)\(", sources, re.MULTILINE))
    assert exported == {*_SIGNATURES, "holdall_version"}


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="nm reads the table of symbols")
def test_nothing_but_own_names_is_exported() -> None:
    """Another library's `checksum` cannot take the place of this one's, nor the other way round."""
    done = subprocess.run(["nm", "-D", "--defined-only", built_path()], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1] for line in done.stdout.splitlines()}
    assert symbols == {*_SIGNATURES, "holdall_version", "PyInit__native"}
