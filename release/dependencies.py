"""Print the requirements of pyproject.toml, one per line, for `pip install -r`.

python release/dependencies.py --build            # the requirements of the build
python release/dependencies.py sb3 dev            # the requirements of holdall, with two extras
python release/dependencies.py --oldest sb3 cloud # the oldest versions that are allowed, for `pip install -c`
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

LOWER_BOUND = re.compile(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)")


def main() -> None:
    """Print the requirements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help="optional dependencies that are wanted")
    parser.add_argument("--build", action="store_true", help="print the requirements of the build")
    parser.add_argument("--oldest", action="store_true", help="print `name==lowest version`")
    options = parser.parse_args()
    declared = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    requirements = (
        declared["build-system"]["requires"] if options.build else list_dependencies(declared, options.extras)
    )
    print("\n".join(list_oldest_versions(requirements) if options.oldest else requirements))


def list_dependencies(declared: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the dependencies of holdall with `extras`."""
    project = declared["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def list_oldest_versions(requirements: list[str]) -> list[str]:
    """Return a line for every requirement that has a lower bound."""
    bounds = (LOWER_BOUND.match(requirement) for requirement in requirements)
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound})


if __name__ == "__main__":
    main()
