"""Run the wheel for Linux on ARM64 in an emulator: `python release/arm64.py dist`, after `make wheels`.

On Debian or Ubuntu. qemu-user and a Python for ARM64 come as Debian packages and are unpacked below .cache/arm64;
nothing is installed. The wheel and what it depends on are unpacked there, too, and release/smoke.py runs in it.
Out: the line that release/smoke.py prints, and the seconds. Emulated, everything is some 20 times slower.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "arm64"


def run(*command: str | Path, cwd: Path | None = None, **settings: str) -> str:
    """Run a command; end if it fails, and return what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=os.environ | settings, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def unpacked(architecture: str, root: Path, *packages: str) -> Path:
    """Fetch Debian packages with what they depend on, unpack all of it to `root`, and return that."""
    if root.exists():
        return root
    state = root.with_suffix(".apt")
    shutil.rmtree(state, ignore_errors=True)
    for folder in ("lists/partial", "cache/archives/partial", "etc"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "Dir::State": state,
        "Dir::State::Lists": state / "lists", "Dir::State::Status": state / "status", "Dir::Cache": state / "cache",
        "APT::Install-Recommends": "false", "Acquire::Languages": "none", "Debug::NoLocking": "true",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", *options, "-qq", "update")
    run("apt-get", *options, "-qq", "-y", "--download-only", "install", *packages)
    begun = root.with_suffix(".begun")
    for name in ("bin", "sbin", "lib", "lib64"):  # as Debian has them: links into usr
        (begun / "usr" / name).mkdir(parents=True, exist_ok=True)
        (begun / name).symlink_to(f"usr/{name}")
    for archive in sorted((state / "cache" / "archives").glob("*.deb")):
        shell = 'dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --keep-directory-symlink'
        run("sh", "-c", shell, "sh", archive, begun)
    return begun.rename(root)


def main() -> None:
    """Fetch, unpack and run."""
    if len(sys.argv) != 2 or not shutil.which("apt-get"):
        sys.exit(__doc__ if len(sys.argv) != 2 else "error: this needs apt-get, so Debian or Ubuntu")
    (wheel,) = Path(sys.argv[1]).resolve().glob("holdall-*aarch64.whl")
    CACHE.mkdir(parents=True, exist_ok=True)
    here = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    emulator = unpacked(here, CACHE / "emulator", "qemu-user-static") / "usr" / "bin" / "qemu-aarch64-static"
    root = unpacked("arm64", CACHE / "root", "python3", "libstdc++6")  # NumPy needs the second
    python = next(path for path in sorted((root / "usr" / "bin").glob("python3.*")) if path.name[8:].isdigit())
    with tempfile.TemporaryDirectory() as folder:
        version = python.name.removeprefix("python")
        tags = ["--platform=manylinux2014_aarch64", *(f"--platform=manylinux_2_{n}_aarch64" for n in (17, 27, 28))]
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(
            *pip,
            "--only-binary",
            ":all:",
            *tags,
            "--python-version",
            version,
            "--implementation",
            "cp",
            "--target",
            folder,
            wheel,
        )
        begun = time.perf_counter()
        smoke = ROOT / "release" / "smoke.py"
        print(run(emulator, "-L", root, python, smoke, "--linked", cwd=Path(folder), PYTHONPATH=folder).strip())
        print(f"{time.perf_counter() - begun:.0f} s, emulated")


if __name__ == "__main__":
    main()
