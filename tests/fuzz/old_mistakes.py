"""Mistakes of earlier versions. The fuzz tests put each of them back into a copy of holdall, and must notice it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import holdall


class OldMistake(NamedTuple):
    """A mistake that holdall once had."""

    file: str  # Path inside of the package.
    right: str  # Part of the present code.
    wrong: str  # The code with the mistake, in place of `right`.
    message: str  # Pattern in the output of a fuzz run that notices the mistake.

    def put_back(self, package: Path) -> None:
        """Put the mistake into `package`, which is a copy of holdall."""
        path = package / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.right, self.wrong), encoding="utf-8")

    def require_present_code(self) -> None:
        """Require that `right` occurs once in holdall, so that `put_back` changes it."""
        text = (Path(holdall.__file__).parent / self.file).read_text(encoding="utf-8")
        assert text.count(self.right) == 1, f"{self.file} has changed. Write the mistake for the present code."
