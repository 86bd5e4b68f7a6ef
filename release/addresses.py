"""Set the address of the repository everywhere: `python release/addresses.py https://github.com/OWNER/NAME`.

pyproject.toml has the address (`Homepage`). README.md, mkdocs.yml and CITATION.cff repeat it, because their readers do
not read pyproject.toml. The address of the documentation is that of GitHub's pages, unless --docs names another one.
Without an address, the script checks that all files agree. The exit status is 1 if they do not.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "README.md", "mkdocs.yml", "CITATION.cff")
PLACEHOLDER = "holdall-rl"


def read_addresses() -> tuple[str, str]:
    """Return the addresses of the repository and of the documentation."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    return urls["Homepage"], urls["Documentation"]


def get_pages_address(repository: str) -> str:
    """Return the address at which GitHub publishes the documentation of a repository."""
    owner, name = repository.rstrip("/").split("/")[-2:]
    return f"https://{owner.lower()}.github.io/{name}/"


def find_wrong_files() -> list[str]:
    """Return the files that do not have the address of the repository, or name another one of GitHub."""
    repository, _ = read_addresses()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
    others = {name: text.replace(repository, "") for name, text in texts.items()}
    return [name for name in FILES if repository not in texts[name] or "//github.com/" in others[name]]


def main() -> None:
    """Set the addresses, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?")
    parser.add_argument("--docs", help="default: GitHub's pages of the repository")
    given = parser.parse_args()
    if given.repository:
        repository = given.repository.rstrip("/")
        new = (repository, given.docs or get_pages_address(repository))
        old = read_addresses()
        for name in FILES:
            text = (ROOT / name).read_text(encoding="utf-8")
            for before, after in zip(old, new, strict=True):
                text = text.replace(before, after)
            (ROOT / name).write_text(text, encoding="utf-8")
    if wrong := find_wrong_files():
        sys.exit(f"error: {', '.join(wrong)}: the address is not that of pyproject.toml")
    print(*read_addresses(), sep="\n")
    if PLACEHOLDER in read_addresses()[0]:
        print("note: this is a placeholder; set the real address before the first release", file=sys.stderr)


if __name__ == "__main__":
    main()
