"""Build the source distribution and a wheel for this platform: `make wheels`.

    python release/wheels.py [--out dist]

The wheel is built from the source distribution, so that a missing source file is noticed. release/check_wheels.py then
checks both and tests the wheel. For other platforms, .github/workflows/release.yml builds wheels from the same archive.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".cache" / "wheels"
CONSTRAINTS = ROOT / "constraints.txt"


def run(*command: str | Path) -> None:
    """Run a command with the pinned versions. End this script if the command fails."""
    words = [str(word) for word in command]
    environment = os.environ | {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)} exited with {done.returncode}")


def main() -> None:
    """Build the distributions, and check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("holdall-*"):
        old.unlink()
    venv.create(TOOLS, with_pip=True)
    python = TOOLS / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "pip", "build")
    run(python, "-m", "build", "--outdir", out)
    run(python, ROOT / "release" / "check_wheels.py", out, "--tests")


if __name__ == "__main__":
    main()
