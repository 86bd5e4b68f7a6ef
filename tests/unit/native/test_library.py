"""The loader: a library is used only if it agrees with the Python code, and exports nothing but its own names."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdall.native import compiled_library, library, open_library
from holdall.native.library import _COMPRESSION, _SIGNATURES, _STRUCTS

LIBRARY = compiled_library()
FOLDER = Path(library.__file__).parent
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the compiled loops were not built here")


def built_path() -> Path:
    assert LIBRARY is not None
    return Path(LIBRARY._name)


@needs_library
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale build is not called with the wrong arguments; the reason names both versions."""
    version = library._VERSION
    monkeypatch.setattr(library, "_VERSION", version + 1)
    with pytest.raises(OSError, match=f"is of version {version}, and this is version {version + 1}"):
        open_library(built_path())


@needs_library
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


@needs_library
def test_a_struct_that_only_one_side_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever side it is."""
    monkeypatch.setattr(library, "_STRUCTS", {name: _STRUCTS[name] for name in _STRUCTS if name != "names"})
    with pytest.raises(OSError, match=r"names\."):
        open_library(built_path())


@needs_library
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


MISSING = """
import sys, warnings
from pathlib import Path
import gymnasium as gym
import holdall
from holdall.native import library
library.__file__ = str(Path(sys.argv[1], "library.py"))
{prepare}
def made():
    return holdall.ReplayMemory(gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2), 10)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    memory = made()
    made()
    rollout = holdall.RolloutMemory(gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2), num_steps=4, num_envs=1)
shown = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
assert [warning.filename for warning in caught][:1] in ([], [__file__]), caught[0].filename
for report in (memory.report(), rollout.report()):
    assert report.as_dict()["fallback"] == report.fallback
    assert report.fallback in str(report)
print(len(shown), *shown, report.fallback, sep="|")
"""


def shown_without(tmp_path: Path, prepare: str = "", **settings: str) -> list[str]:
    """Return how many warnings a process gives that makes three memories, the warnings, and what report() says."""
    script = tmp_path / "script.py"
    script.write_text(MISSING.format(prepare=prepare))
    environment = {name: text for name, text in os.environ.items() if name != "HOLDALL_KERNELS"} | settings
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=100)
    return done.stdout.strip().split("|")


def test_a_missing_library_warns_once_and_stands_in_the_report(tmp_path: Path) -> None:
    """The warning and the report name the reason and how much slower NumPy is; the warning names the remedy, too."""
    count, warning, reported = shown_without(tmp_path)
    assert count == "1"
    assert "was not built): add and sample take" in reported
    assert warning.startswith(reported)
    assert "pip install" in warning


def test_a_refused_library_warns_with_its_reason(tmp_path: Path) -> None:
    """A file that is no library, for instance."""
    (tmp_path / ("_kernels" + library._SUFFIX)).write_bytes(b"no library")
    count, warning, reported = shown_without(tmp_path)
    assert count == "1"
    assert "_kernels" in reported
    assert "was not built" not in reported
    assert warning.startswith(reported)


def test_who_asks_for_numpy_is_not_warned(tmp_path: Path) -> None:
    """The report says it all the same."""
    count, reported = shown_without(tmp_path, HOLDALL_KERNELS="portable")
    assert count == "0"
    assert "HOLDALL_KERNELS is portable" in reported


@needs_library
def test_missing_compression_warns_and_stands_in_the_report(tmp_path: Path) -> None:
    """The loops are compiled, but there is no libzstd for them to call."""
    prepare = f"library.__file__ = {library.__file__!r}; library._load = lambda name: None"
    prepare += "; from holdall import native; native.linked_libraries = lambda library: None"
    count, warning, reported = shown_without(tmp_path, prepare)
    assert count == "1"
    assert "libzstd or liblz4 was not found" in reported
    assert warning.startswith(reported)


@needs_library
def test_a_complete_build_says_nothing(tmp_path: Path) -> None:
    assert shown_without(tmp_path, f"library.__file__ = {library.__file__!r}") == ["0", ""]


def test_every_exported_function_is_declared() -> None:
    """Each EXPORT in C has its types in the loader, and the other way round."""
    sources = "".join(path.read_text() for path in sorted(FOLDER.glob("*.c")))
    exported = set(re.findall(r"^EXPORT [^;{]*?\b(\w+)\(", sources, re.MULTILINE))
    assert exported == {*_SIGNATURES, "holdall_version"}


def test_wheels_have_every_function_of_zstandard_and_lz4_that_is_called() -> None:
    """One that is missing from the table in C would make every wheel look for the system's libraries."""
    linked = re.findall(r"^ +FUNCTION\((\w+)\),$", (FOLDER / "library.c").read_text(), re.MULTILINE)
    assert sorted(linked) == sorted(name for signatures in _COMPRESSION.values() for name in signatures)


@needs_library
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="nm reads the table of symbols")
def test_nothing_but_own_names_is_exported() -> None:
    """Another library's `checksum` cannot take the place of this one's, nor the other way round."""
    done = subprocess.run(["nm", "-D", "--defined-only", built_path()], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1] for line in done.stdout.splitlines()}
    assert symbols == {*_SIGNATURES, "holdall_version"}
