"""The first screen of the README."""

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_screen_has_one_sentence_the_install_line_the_difference_and_five_rows() -> None:
    text = README.read_text(encoding="utf-8")
    places = [
        text.index(part) for part in ("bit for bit, in a fraction", "pip install", "```diff", "<picture>", "| a tran")
    ]
    assert places == sorted(places)
    assert text[: text.index("## ")].count("\n| ") == 1 + 5
    assert len(text.splitlines()) < 120
