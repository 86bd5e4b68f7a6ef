"""Build of the native module `holdall._native`. pyproject.toml declares everything else.

Zstandard and LZ4 are compiled into the module. pip downloads the source distributions that contain them, in the
versions and with the hashes of third_party.txt, and their C files are kept in third_party/. holdall's own source
distribution contains that folder, so building from it needs no network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
SOURCES = Path("src/holdall/_native")
VERSIONS = SOURCES / "third_party.txt"
THIRD_PARTY = Path("third_party")

# The files that are compiled or included, by package.
THIRD_PARTY_FILES = {
    "zstandard": ("zstd/zstd.c", "zstd/zstd.h", "zstd/zstd_errors.h", "zstd/LICENSE"),
    "lz4": ("lz4libs/lz4.c", "lz4libs/lz4.h", "lz4libs/lz4hc.c", "lz4libs/lz4hc.h"),
}

INCLUDES = [str(THIRD_PARTY / name) for name in THIRD_PARTY_FILES]
FLAGS = ["-O3", "-std=c11", "-fvisibility=hidden", "-g0"]

# The functions of both libraries are called inside the module only. Without these macros they would be exported.
HIDE_THIRD_PARTY = [
    (name, "") for name in ("ZSTDLIB_VISIBLE", "ZSTDERRORLIB_VISIBLE", "ZDICTLIB_VISIBLE", "LZ4LIB_VISIBILITY")
]


def fetch_third_party(folder: Path, versions: Path) -> None:
    """Download the C files of Zstandard and LZ4 to `folder`, unless it has those of `versions` already."""
    fetched_versions = folder / versions.name
    if fetched_versions.exists() and fetched_versions.read_bytes() == versions.read_bytes():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages = ",".join(THIRD_PARTY_FILES)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # pip reads the metadata of both packages with the build tools that they name. Constraints of holdall's own
        # build must not apply to these tools.
        constraints = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
        subprocess.run(
            [*pip, "--no-binary", packages, "--require-hashes", "--requirement", str(versions), "--dest", scratch],
            env={name: value for name, value in os.environ.items() if name not in constraints},
            check=True,
        )
        complete = Path(scratch, "complete")
        for package, files in THIRD_PARTY_FILES.items():
            (complete / package).mkdir(parents=True)
            (archive,) = Path(scratch).glob(f"{package}-*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(scratch, filter="data")
            for file in files:
                shutil.copy(Path(scratch, archive.name.removesuffix(".tar.gz"), file), complete / package)
        # The licence of LZ4 is the first comment of its source.
        lz4_source = (complete / "lz4" / "lz4.c").read_text(encoding="utf-8")
        lz4_licence = lz4_source[: lz4_source.index("*/")].lstrip("/*\n ")
        (complete / "lz4" / "LICENSE").write_text(lz4_licence, encoding="utf-8")
        shutil.copy(versions, complete)
        shutil.rmtree(folder, ignore_errors=True)
        complete.rename(folder)


class BuildThirdParty(build_clib):
    """Compiles Zstandard and LZ4 to a static library in build/third_party.

    Compiling takes a minute, so the library is kept there until its sources change. The default folder is a temporary
    one in editable installs.
    """

    def finalize_options(self) -> None:
        """Set the folder of the library and of its object files."""
        super().finalize_options()
        self.build_clib = "build/third_party"
        self.build_temp = "build/third_party"

    def build_libraries(self, libraries: list[tuple[str, dict[str, object]]]) -> None:
        """Compile the libraries. This is the first use of the C compiler, so a missing one is reported here."""
        try:
            super().build_libraries(libraries)
        except CompileError as error:
            raise CompileError(
                f"{error}\nholdall contains C code, and building it from source needs a working C compiler such as gcc "
                "or clang. Install one, or install a wheel instead: pip install --only-binary holdall holdall"
            ) from error


def with_absolute_links(text: str, repository: str) -> str:
    """Return a Markdown text whose relative links and pictures point to `repository`. Code blocks stay as they are.

    A package index shows the README, but does not have the other files of the repository.
    """
    link = re.compile(r"""(!?)(\[[^\]]*\]\(|(?:src|srcset)=")(?![a-z]+:|#)([^)"\s]+)""")

    def make_absolute(match: re.Match[str]) -> str:
        is_picture = match[1] or match[2].startswith("src")
        return f"{match[1]}{match[2]}{repository}/{'raw' if is_picture else 'blob'}/main/{match[3]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else link.sub(make_absolute, part) for part in parts)


def main() -> None:
    """Fetch the sources and build."""
    fetch_third_party(ROOT / THIRD_PARTY, ROOT / VERSIONS)
    third_party_sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / THIRD_PARTY).glob("*/*.c"))
    third_party = {
        "sources": third_party_sources,
        "obj_deps": {"": ["setup.py", str(VERSIONS)]},
        "include_dirs": INCLUDES,
        "macros": HIDE_THIRD_PARTY,
        "cflags": FLAGS,
    }
    native = Extension(
        "holdall._native",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).glob("*.c")),
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).glob("*.h")),
        include_dirs=[numpy.get_include(), *INCLUDES],
        extra_compile_args=FLAGS,
        extra_link_args=["-static"] if sys.platform == "win32" else [],
        py_limited_api=True,
    )
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
    # The C code uses extensions of GCC and Clang, which Microsoft's compiler does not have.
    compiler = {"compiler": "mingw32"} if sys.platform == "win32" else {}
    setup(
        ext_modules=[native],
        libraries=[("holdall_third_party", third_party)],
        cmdclass={"build_clib": BuildThirdParty},
        options={
            "bdist_wheel": {"py_limited_api": "cp311"},
            "build_clib": compiler,
            "build_ext": compiler,
        },
        long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), repository),
        long_description_content_type="text/markdown",
    )


if __name__ == "__main__":
    main()
