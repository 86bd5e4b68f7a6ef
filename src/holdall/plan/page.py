"""A plan as one HTML page that needs nothing else: no scripts, no fonts, no network; light and dark.

In:  a `Plan`.  Out: text.  Invariant: everything that came from the user is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from holdall.plan.answers import Row
from holdall.plan.phases import Phase
from holdall.plan.planned import Plan
from holdall.plan.words import both_units, heading, row_name, size_name

_WIDTH, _BAR, _LEFT = 760, 26, 110
_COLOURS = 7
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6b7c; --line: #d5dde5; --page: #ffffff; --card: #f5f8fa;
  --good: #1a7f4b; --warn: #a86400; --bad: #b3261e; --c0: #33658a; --c1: #86bbd8; --c2: #758e4f; --c3: #f6ae2d;
  --c4: #f26419; --c5: #8a5a83; --c6: #5f7470; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa9b8; --line: #33404d; --page: #0f151b;
  --card: #18212a; --good: #4cc38a; --warn: #f0b429; --bad: #ff7b72; --c0: #5b9bd0; --c1: #2f5f7d; --c2: #9dbb6f;
  --c3: #d99a1b; --c4: #e0713a; --c5: #b98ab2; --c6: #8aa39e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 860px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
p.soft, figcaption, .soft { color: var(--soft) } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: var(--soft); font-weight: 600 }
.fits { color: var(--good) } .tight { color: var(--warn) } .no { color: var(--bad) }
pre { background: var(--card); padding: .8rem 1rem; overflow-x: auto; border-radius: 6px }
figure { margin: 1rem 0; overflow-x: auto } svg text { fill: var(--ink); font-size: 12px }
svg text.soft { fill: var(--soft) } .key { display: inline-block; width: .8em; height: .8em; border-radius: 2px }
"""


def page(plan: Plan) -> str:
    """Write the page."""
    title = escape(heading(plan))
    limit, host = plan.known.room.limit_bytes, (*plan.phases, *plan.holdall_phases)
    vram = plan.known.room.vram.free_bytes if plan.known.room.vram else 0
    body = [
        f"<h1>{title}</h1>",
        f'<p class="{_css(str(plan.verdict))}"><strong>{plan.verdict}</strong></p>',
        _checks(plan),
        "<h2>Memory by phase</h2>",
        _bars(plan.phases, limit, host, "With Stable-Baselines3's buffer"),
        _bars(plan.holdall_phases, limit, host, "With holdall's memory") if plan.holdall_phases else "",
        _bars(plan.vram, vram, plan.vram, "On the GPU") if plan.vram else "",
        f"<h2>{row_name(plan.spec)} against memory</h2>",
        _curves(plan.table, plan.known.room.limit_bytes),
        _capacities(plan),
        "<h2>Profiles, as shares of the limit</h2>",
        _profiles(plan),
        "<h2>To paste</h2>",
        f"<p>{escape(plan.change.title)}: {escape(plan.change.why)}.</p>" if plan.change else "",
        f"<pre>{escape(plan.code)}</pre>",
        "<ul>" + "".join(f'<li class="soft">{escape(note)}</li>' for note in plan.notes) + "</ul>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"


def _css(verdict: str) -> str:
    return {"fits": "fits", "tight": "tight"}.get(verdict, "no")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _said(verdict: object) -> str:
    return f'<span class="{_css(str(verdict))}">{verdict}</span>'


def _checks(plan: Plan) -> str:
    rows = [
        (
            escape(check.what),
            both_units(check.need_bytes),
            both_units(check.most_bytes),
            escape(check.limit.name),
            both_units(check.limit.free_bytes),
            _said(check.verdict),
        )
        for check in plan.checks
    ]
    return _table(("", "needs", "at most", "against", "free", ""), rows)


def _bars(phases: Sequence[Phase], limit: int, beside: Sequence[Phase], caption: str) -> str:
    """Draw a stacked bar a phase, and the limit as a line, on a scale that holds what stands beside it, too."""
    names = list(dict.fromkeys(part.name for phase in phases for part in phase.parts))
    most = max([limit, *(phase.nbytes for phase in beside)]) or 1
    scale = (_WIDTH - _LEFT - 10) / most
    marks = []
    for line, phase in enumerate(phases):
        top, left = line * (_BAR + 8), float(_LEFT)
        marks.append(f'<text x="0" y="{top + 17}">{escape(phase.name)}</text>')
        for part in phase.parts:
            wide = part.nbytes * scale
            colour = f"var(--c{names.index(part.name) % _COLOURS})"
            tip = escape(f"{part.name}: {both_units(part.nbytes)}, {part.how}")
            marks.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}" fill="{colour}">'
                f"<title>{tip}</title></rect>"
            )
            left += wide
    tall = len(phases) * (_BAR + 8)
    if limit:
        x = _LEFT + limit * scale
        marks.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{tall}" stroke="var(--bad)" stroke-dasharray="4 3"/>')
    keys = "".join(
        f'<span class="key" style="background: var(--c{i % _COLOURS})"></span> {escape(name)} &nbsp; '
        for i, name in enumerate(names)
    )
    dashed = f"The dashed line is the limit, {both_units(limit)}." if limit else ""
    svg = f'<svg viewBox="0 0 {_WIDTH} {tall}" width="{_WIDTH}" role="img">{"".join(marks)}</svg>'
    return f"<figure>{svg}<figcaption>{escape(caption)}. {keys}<br>{dashed}</figcaption></figure>"


def _curves(rows: Sequence[Row], limit: int) -> str:
    """Draw bytes over capacity for both buffers."""
    tall, most_size = 240, max(row.size for row in rows)
    most = max([limit, *(row.sb3_bytes for row in rows)]) or 1

    def at(size: int, nbytes: int) -> str:
        return f"{_LEFT + (_WIDTH - _LEFT - 90) * size / most_size:.1f},{tall - (tall - 20) * nbytes / most:.1f}"

    marks = [f'<line x1="{_LEFT}" x2="{_WIDTH - 90}" y1="{tall}" y2="{tall}" stroke="var(--line)"/>']
    curves = {"SB3": [(row.size, row.sb3_bytes) for row in rows]}
    curves["holdall"] = [(row.size, row.holdall_bytes) for row in rows if row.holdall_bytes is not None]
    for number, (name, points) in enumerate(curves.items()):
        if points:
            path = " ".join(at(*point) for point in [*points, (0, 0)])
            x, y = at(*points[0]).split(",")
            marks.append(f'<polyline points="{path}" fill="none" stroke="var(--c{4 * number})" stroke-width="2.5"/>')
            marks.append(f'<text x="{float(x) + 6}" y="{y}">{name}</text>')
    y = at(0, limit).split(",")[1]
    marks.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 90}" y1="{y}" y2="{y}" stroke="var(--bad)" stroke-dasharray="4 3"/>'
        f'<text x="0" y="{float(y) + 4}" class="soft">limit</text>'
        f'<text x="{_WIDTH - 90}" y="{tall + 16}" text-anchor="end" class="soft">{size_name(most_size)}</text>'
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {tall + 22}" width="{_WIDTH}" role="img">{"".join(marks)}</svg></figure>'
    )


def _capacities(plan: Plan) -> str:
    rows = []
    for row in plan.table:
        cells = [size_name(row.size), both_units(row.sb3_bytes), _said(row.sb3_verdict)]
        if row.holdall_bytes is not None:
            cells += [both_units(row.holdall_bytes), _said(row.holdall_verdict)]
        rows.append(cells)
    heads = [row_name(plan.spec).lower(), "SB3's buffer", "the run"]
    return _table(heads + (["holdall's", "the run"] if plan.known.experience else []), rows)


def _profiles(plan: Plan) -> str:
    rows = [
        (
            profile.name,
            f"{profile.share:.0%}",
            both_units(profile.limit_bytes),
            size_name(profile.batch_size),
            size_name(profile.sb3_size),
            "" if profile.holdall_size is None else size_name(profile.holdall_size),
        )
        for profile in plan.profiles
    ]
    return _table(("profile", "of the limit", "for the run", "batch", "SB3 holds", "holdall holds"), rows)
