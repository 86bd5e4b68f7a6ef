"""Print the oldest versions that pyproject.toml allows, as constraints: `python release/oldest.py > oldest.txt`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("sb3", "contrib", "cloud")


def oldest() -> list[str]:
    """Return a line for every dependency with a lower bound."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    bounds = (re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", line) for line in wanted)
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound})


if __name__ == "__main__":
    print("\n".join(oldest()))
