"""News: which verdicts were not told within the last minute."""

from __future__ import annotations

from collections.abc import Iterable

from holdall.watch.verdicts.verdict import Verdict

_TOLD_AGAIN_S = 60.0


class News:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def of(self, verdicts: Iterable[Verdict], moment: float) -> list[Verdict]:
        """Return what is to be told now."""
        return [one for one in verdicts if self._is_news(one, moment)]

    def _is_news(self, verdict: Verdict, moment: float) -> bool:
        key = f"{verdict.name} {verdict.evidence.get('buffer', verdict.evidence.get('of', ''))}"
        if moment - self._told.get(key, 0.0) < _TOLD_AGAIN_S:
            return False
        self._told[key] = moment
        return True
