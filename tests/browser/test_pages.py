"""Pages in a real browser: without errors and requests, and usable by pointer and keyboard at any width and theme."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdall.tools.report.page import BarPiece, BarRow, bars, section, write_page

from .conftest import Open

KINDS = ["recorded", "long", "results", "buffers"]

_DRAWN = """[...document.querySelectorAll('.plot svg path, .bars rect.mark, .bars circle.mark')]
    .map((shape) => shape.getBoundingClientRect()).filter((box) => box.width > 0).length"""
_WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
_FAINT = """(() => {
  const parsed = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parsed(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parsed(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return getComputedStyle(element).backgroundColor;
    }
  };
  const faint = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest('script, .band-name, svg')) continue;
    const [one, other] = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < 4.5) faint.push(element.className + ': ' + element.textContent.slice(0, 40));
  }
  return faint;
})()"""
_CUT_OFF = """[...document.querySelectorAll('body *')].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()) &&
    element.checkVisibility({visibilityProperty: true}) &&
    !element.closest('script, pre, caption, .scroll:not(.short)'))
  .filter((element) => { const box = element.getBoundingClientRect();
    const isCut = element.clientWidth && element.scrollWidth > element.clientWidth + 1;
    return box.left < 0 || box.right > innerWidth || isCut; })
  .map((element) => element.className + ': ' + element.textContent.slice(0, 40))"""
_TIP_ENDS = "(({left, right}) => [left, right])(document.getElementById('tip').getBoundingClientRect())"
_UNNAMED = """[...document.querySelectorAll('[tabindex="0"], button, summary, a, [role]')]
    .filter((element) => !(element.getAttribute('aria-label') || element.innerText || element.id === 'tip')).length"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_drawn_without_errors_and_requests(
    kind: str, width: int, dark: bool, pages: dict[str, Path], opened: Open
) -> None:
    page = opened(pages[kind], width, dark=dark)
    assert page.complaints == []
    assert page.requests == []
    assert page.ask(_DRAWN) > 5
    scrolled, seen = page.ask(_WIDTHS)
    assert scrolled <= seen == width
    ground = page.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 18, 23)" if dark else "rgb(245, 246, 248)")
    assert page.ask(_FAINT) == []
    assert page.ask(_UNNAMED) == 0
    assert page.ask(_CUT_OFF) == []


@pytest.mark.parametrize("kind", ["bench", "bench buffers"])
def test_pages_of_real_results_are_drawn_without_errors_and_requests(
    kind: str, pages: dict[str, Path], opened: Open
) -> None:
    page = opened(pages[kind], 400, dark=True)
    assert (page.complaints, page.requests, page.ask(_FAINT)) == ([], [], [])
    assert page.ask(_DRAWN) > 5
    assert page.ask("document.documentElement.scrollWidth") <= 400


def test_texts_of_a_file_are_never_executed(pages: dict[str, Path], opened: Open) -> None:
    for kind in ("long",):
        page = opened(pages[kind])
        assert page.ask("window.harmed") is None
        assert page.ask("document.images.length") == 0
        assert page.ask("document.body.innerText.includes('</script><script>window.harmed=1')") is True


def test_the_reading_under_the_pointer_is_shown(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["recorded"])
    assert page.tip() is None
    page.point(".plot", 0.5)
    before = page.tip() or ""
    assert all(word in before for word in ("step", "buffers", "together", "MiB"))
    page.point(".plot", 0.9)
    assert page.tip() not in {before, None}
    page.point("h1")
    assert page.tip() is None


def test_a_thinned_recording_is_drawn_with_its_peak(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["long"])
    page.point(".plot", 0.5)
    assert "1.4 GiB" in (page.tip() or "")  # 400 MiB and the spike of one reading in 5,000
    assert pages["long"].stat().st_size < 600_000


@pytest.mark.parametrize("width", [1200, 400])
def test_plots_and_bars_can_be_read_with_the_keyboard(width: int, pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["recorded"], width)
    active = "document.activeElement.className.baseVal ?? document.activeElement.className"
    reached = []
    for _ in range(25):
        page.press("Tab")
        reached.append(str(page.ask(active)))
        if "mark c0" in reached[-1]:
            break
    assert any("plot" in name for name in reached)
    assert "mark c0" in reached[-1]
    first = page.tip() or ""
    assert "peak" in first
    page.press("ArrowRight")
    assert page.tip() not in {first, None}
    page.press("Escape")
    assert page.tip() is None


def test_arrow_keys_move_through_the_readings(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["recorded"])
    page.ask("document.querySelector('.plot').focus({focusVisible: true})")
    last = page.tip()
    page.press("Home")
    first = page.tip() or ""
    assert first.startswith("after 0 s")
    page.press("ArrowRight")
    assert page.tip() not in {first, last, None}
    page.press("End")
    assert page.tip() == last
    spoken = page.ask("document.querySelector('.plot').getAttribute('aria-valuetext')")
    assert "buffers" in spoken
    page.ask("document.activeElement.blur()")
    assert page.tip() is None


@pytest.mark.parametrize(
    ("marks", "message"), [(".bars rect.mark", "train: 512.0 MiB"), (".bars circle.mark", "-5 ± 1.24")]
)
def test_bars_and_points_show_their_figures_under_the_pointer(
    marks: str, message: str, pages: dict[str, Path], opened: Open
) -> None:
    page = opened(pages["results"])
    page.point(marks)
    assert message in (page.tip() or "")
    page.point("h1")
    page.ask(f"document.querySelector('{marks}[tabindex=\"0\"]').focus({{focusVisible: true}})")
    assert message in (page.tip() or "")


def test_no_point_is_cut_off(tmp_path: Path, opened: Open) -> None:
    rows = [BarRow(str(value), [BarPiece(value, "c0", "")], str(value)) for value in (8.5, 9.0)]
    chart = bars(rows, "rewards of one seed", "number", dots=True, begin=8.5)
    (tmp_path / "page.html").write_text(write_page("points", "bench", [], [section("", chart)]), encoding="utf-8")
    left, right = opened(tmp_path / "page.html", 400).ask(
        "[...document.querySelectorAll('.bars circle')].map((point) => {"
        "const inner = point.getBoundingClientRect(), outer = point.ownerSVGElement.getBoundingClientRect();"
        "return Math.min(inner.left - outer.left, outer.right - inner.right) })"
    )
    assert left >= 0
    assert right >= 0


def test_a_tooltip_stays_inside_a_narrow_page(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["recorded"], 400)
    for share in (0.01, 0.5, 0.99):
        page.point(".plot", share)
        left, right = page.ask(_TIP_ENDS)
        assert 0 <= left < right <= 400


def test_the_theme_can_be_switched_and_is_announced(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["results"])
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(ground)
    assert page.ask("document.getElementById('theme').textContent") == "Dark"
    page.ask("document.getElementById('theme').click()")
    assert page.ask(ground) != light
    assert page.ask("document.getElementById('theme').textContent") == "Light"
    page.ask("document.getElementById('theme').click()")
    assert page.ask(ground) == light


def test_a_page_without_scripts_says_that_it_needs_them(pages: dict[str, Path], opened: Open, tmp_path: Path) -> None:
    text = pages["recorded"].read_text(encoding="utf-8")
    still = tmp_path / "still.html"
    still.write_text(text.replace("sha256-", "sha256-not"), encoding="utf-8")
    page = opened(still)
    assert "Content Security Policy" in page.complaints[0]
    assert "needs its own script" in page.ask("document.body.innerText")


def test_the_readings_of_a_plot_are_also_a_table(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["recorded"])
    assert page.ask("document.querySelectorAll('.plot-frame + details table tbody tr').length") > 20
    last = page.ask("document.querySelector('.plot-frame + details tbody tr:last-child').textContent")
    assert last.startswith("after 41.2 s, step 54,422")


def test_axes_have_round_values_and_titles(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["recorded"])
    ticks = "[...document.querySelector('.y-axis').children].map((tick) => tick.textContent)"
    assert page.ask(ticks) == ["0 B", "128 MiB", "256 MiB", "384 MiB"]
    titles = page.ask("[...document.querySelectorAll('.axis-title')].map((title) => title.textContent)")
    assert {"memory", "time since the first reading", "steps a second"} <= set(titles)
    assert "limit 23.5 GiB, memory of the machine (above the scale)" in page.ask("document.body.textContent")
