"""Build hook: compile the C loops into a shared library beside the Python code.

In:  the C files in src/holdall/native and whatever C compiler the machine has.
Out: _kernels.so (.dylib, .dll) and a wheel tagged for this platform; without a compiler, a warning and a pure wheel.
The library is built without Python's headers, so one build serves every Python version.

`make wheels` sets two variables, and then a failure is an error:
HOLDALL_BUILD_TARGET       a name of TARGETS: cross-compile for that platform with the package ziglang.
HOLDALL_BUILD_COMPRESSION  a folder with the sources of Zstandard and LZ4, which are then linked in.

The README in the package's metadata has whole addresses: a package index knows no files of the repository.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import sys_tags

FOLDER = Path("src/holdall/native")
SOURCES = sorted(path.relative_to(Path(__file__).parent) for path in Path(__file__).parent.joinpath(FOLDER).glob("*.c"))
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
LIBRARY = FOLDER / f"_kernels{SUFFIX}"
REASON = FOLDER / "_kernels.txt"  # why there is no library
FLAGS = ["-O3", "-std=c11", "-shared", "-fvisibility=hidden"]
if sys.platform != "win32":
    FLAGS.append("-fPIC")  # Windows code is always position independent, and some compilers refuse the flag there


class Target(NamedTuple):
    """A platform that a wheel is built for on another one."""

    triple: str  # zig's name for it, with the oldest version of its C library
    tag: str  # the wheel's
    suffix: str


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64.manylinux2014_x86_64", ".so"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64.manylinux2014_aarch64", ".so"),
    "macos-x86_64": Target("x86_64-macos.11.0", "macosx_11_0_x86_64", ".dylib"),
    "macos-arm64": Target("aarch64-macos.11.0", "macosx_11_0_arm64", ".dylib"),
    "windows-amd64": Target("x86_64-windows-gnu", "win_amd64", ".dll"),
}

PROBE = "#include <stdint.h>\n#include <string.h>\nuint8_t probe(uint8_t *p) { memset(p, 0, 8); return *p; }\n"

# Machines that ziglang publishes wheels for; asking for it elsewhere would fail the installation.
ZIG_MACHINES = {"x86_64", "amd64", "aarch64", "arm64"}


def compile_shared(command: list[str], sources: list[Path], library: Path) -> str | None:
    """Compile `sources` to `library`; return what went wrong, or None."""
    library.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a process that has the old library mapped keeps it whole.
    scratch = library.with_name(f"{library.stem}.{os.getpid()}{library.suffix}")
    try:
        done = subprocess.run(
            [*command, *FLAGS, *map(str, sources), "-o", str(scratch)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            scratch.replace(library)
            return None
        return f"{shlex.join(command)} exited with {done.returncode}: {done.stderr.strip()[-2000:]}"
    except OSError as error:
        return f"{shlex.join(command)}: {error}"
    finally:
        for left in library.parent.glob(f"{scratch.stem}.*"):  # on Windows also an import library
            left.unlink()


def compiler_works(command: list[str]) -> bool:
    """Tell whether `command` really builds a shared library: a compiler without headers, or a stub, does not."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        source.write_text(PROBE)
        return compile_shared(command, [source], Path(scratch, f"probe{SUFFIX}")) is None


def system_compiler() -> list[str] | None:
    """Return the first working compiler of $CC, cc, gcc, clang."""
    wanted = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    found = (command for command in wanted if command and shutil.which(command[0]))
    return next((command for command in found if compiler_works(command)), None)


def zig_compiler() -> list[str] | None:
    """Return the command of the compiler that pip can install, if it is installed."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    # By default zig tunes for the machine that builds; a wheel has to run on others, too.
    return [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-fno-sanitize=undefined"]


def compression(folder: Path) -> tuple[list[str], list[Path], dict[str, str]]:
    """Return the flags that link Zstandard and LZ4 in, their sources, and their licences as files of the wheel."""
    zstd, lz4 = folder / "zstandard" / "zstd", folder / "lz4" / "lz4libs"
    notice = folder / "lz4.txt"
    text = (lz4 / "lz4.c").read_text(encoding="utf-8")  # its licence is its first comment
    notice.write_text(text[: text.index("*/")].lstrip("/*\n "), encoding="utf-8")
    flags = ["-DHOLDALL_COMPRESSION", f"-I{zstd}", f"-I{lz4}"]
    licences = {str(zstd / "LICENSE"): "holdall/native/LICENSE.zstd.txt", str(notice): "holdall/native/LICENSE.lz4.txt"}
    return flags, [zstd / "zstd.c", lz4 / "lz4.c", lz4 / "lz4hc.c"], licences


class KernelBuildHook(BuildHookInterface[Any]):
    """Compile the kernels before a wheel or an editable install is put together."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask for a compiler from the package index where the machine has none."""
        if not self._wants_kernels() or system_compiler() or platform.machine().lower() not in ZIG_MACHINES:
            return []
        return ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as built for this platform; on failure go on without the library."""
        if target := os.environ.get("HOLDALL_BUILD_TARGET"):
            return self._cross_compile(TARGETS[target], build_data)
        problem = self._compile() if self._wants_kernels() else "HOLDALL_BUILD_PORTABLE is set"
        if problem:
            Path(self.root, LIBRARY).unlink(missing_ok=True)  # an old library must not outlive its source
            print(
                f"warning: holdall is built without its compiled loops and will use NumPy ({problem})", file=sys.stderr
            )
            # pip shows nothing of a build that succeeds, so the first memory that is made reports this.
            Path(self.root, REASON).write_text(problem, encoding="utf-8")
            build_data["artifacts"].append(REASON.as_posix())
            return None
        Path(self.root, REASON).unlink(missing_ok=True)
        return self._ship(LIBRARY, platform_tag(), build_data)

    def clean(self, versions: list[str]) -> None:
        """Remove the compiled library."""
        for built in (LIBRARY, REASON):
            Path(self.root, built).unlink(missing_ok=True)

    def _wants_kernels(self) -> bool:
        return all(Path(self.root, source).exists() for source in SOURCES) and os.environ.get(
            "HOLDALL_BUILD_PORTABLE", "0"
        ) in {"", "0"}

    def _compile(self) -> str | None:
        command = system_compiler() or zig_compiler()
        if command is None:
            return "no C compiler: tried $CC, cc, gcc, clang and the package ziglang"
        sources = [Path(self.root, source) for source in SOURCES]
        return compile_shared(command, sources, Path(self.root, LIBRARY))

    def _cross_compile(self, target: Target, build_data: dict[str, Any]) -> None:
        """Compile for another platform; on failure there is no wheel."""
        zig = zig_compiler()
        if zig is None:
            raise RuntimeError("HOLDALL_BUILD_TARGET needs the package ziglang; install it")
        command = [*zig, "-target", target.triple, "-s"]
        sources = [Path(self.root, source) for source in SOURCES]
        if folder := os.environ.get("HOLDALL_BUILD_COMPRESSION"):
            flags, linked, licences = compression(Path(folder))
            command, sources = command + flags, sources + linked
            build_data["force_include"].update(licences)
        library = FOLDER / f"_kernels{target.suffix}"
        if problem := compile_shared(command, sources, Path(self.root, library)):
            raise RuntimeError(problem)
        self._ship(library, target.tag, build_data)

    @staticmethod
    def _ship(library: Path, tag: str, build_data: dict[str, Any]) -> None:
        build_data["artifacts"].append(library.as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"


def platform_tag() -> str:
    """Return the wheel tag of this very platform, with no claim of wider compatibility."""
    wider = ("manylinux", "musllinux")
    return next(tag.platform for tag in sys_tags() if not tag.platform.startswith(wider))


class ReadmeHook(MetadataHookInterface):
    """Give the package index a README whose links and pictures lead to the repository."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_addresses(text, metadata["urls"]["Homepage"]),
        }


def with_addresses(text: str, repository: str) -> str:
    """Put the repository's address before relative links and pictures; what stands in blocks of code is left alone."""
    link = re.compile(r"""(!?)(\[[^\]]*\]\(|(?:src|srcset)=")(?![a-z]+:|#)([^)"\s]+)""")

    def whole(found: re.Match[str]) -> str:
        is_picture = found[1] or found[2].startswith("src")
        return f"{found[1]}{found[2]}{repository}/{'raw' if is_picture else 'blob'}/main/{found[3]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else link.sub(whole, part) for part in parts)
