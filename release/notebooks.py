"""Run every notebook in examples/notebooks from top to bottom: `make notebooks`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def main() -> None:
    """Run the notebooks. End with an error at the first cell that fails."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        try:
            NotebookClient(nbformat.read(path, as_version=4), timeout=300, kernel_name="python3").execute()
        except CellExecutionError as error:
            sys.exit(f"error: {path.name}: {error}")
        print(f"{path.name}: ran", flush=True)


if __name__ == "__main__":
    main()
