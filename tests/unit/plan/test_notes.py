"""The configurations in examples/notes are read, and their buffers have the bytes that docs/plan.md names."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdall.tools.plan.config import read_config_file, spec_from_settings
from holdall.tools.plan.planner import both_units

ROOT = Path(__file__).parents[3]
BYTES = {
    "000-rover-replay.toml": 17_051_200_000,
    "001-market-windows.toml": 188_721_600_000,
    "002-trajectory-lists.toml": 1_032_192,
    "003-twenty-gigabytes.toml": 4_128_768,
    "004-game-frames.toml": 4_530_372_608,
}


def test_every_configuration_is_checked() -> None:
    assert {path.name for path in (ROOT / "examples/notes").glob("*.toml")} == set(BYTES)


@pytest.mark.parametrize("name", BYTES)
def test_the_buffer_of_a_note_has_the_bytes_that_the_page_names(name: str) -> None:
    settings = read_config_file(ROOT / "examples/notes" / name)
    spec, _ = spec_from_settings({key: value for key, value in settings.items() if key not in {"memory", "vram"}})
    assert spec.layout().nbytes == BYTES[name]
    page = (ROOT / "docs/plan.md").read_text()
    said = both_units(BYTES[name]).split(" = ")
    assert any(figure in page or figure.replace(".72", ".7") in page for figure in said)
