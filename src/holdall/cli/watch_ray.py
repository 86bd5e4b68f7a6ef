"""`holdall watch --ray`: every memory of a Ray cluster, shard by shard, drawn for 80 columns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdall.cli.watch import Outputs, curve_of, verdict_line
from holdall.errors import ArgumentError, MissingPackageError
from holdall.ray_access import use_token
from holdall.tools.watch.reading import ReadingHistory
from holdall.units import counted, format_bytes

if TYPE_CHECKING:
    from holdall.ray.watch import ClusterPass, ClusterWatch, SeenMemory, SeenShard

_QUIET_RAY_SETTINGS = {
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds in which a head has to answer, and not 20
}
"""What Ray reads when it is imported: the terminal belongs to the view."""

_SHORTEST_TIMEOUT_S, _LONGEST_TIMEOUT_S = 0.5, 5.0
"""How long shards may take to answer; they are asked again when the next turn is due."""
_WIDE = 92  # columns from which on there is room for more than at 80
_COLUMNS = ("#", "node", "pid", "transitions", "full", "held", "USS", "PSS", "of limit", "unacked")
_STATE_COLOURS = {"answers": "green", "drains": "cyan", "starts": "yellow", "restarts": "yellow"}
_UNREACHABLE_COLOUR = "bold red"


def watch_ray(target: list[str], interval: float, outputs: Outputs) -> None:
    """Watch a cluster until interrupted."""
    if len(target) > 1:
        raise ArgumentError(f"TARGET ({' '.join(target)}) is no address; name host and port of Ray's head, or nothing")
    for name, value in _QUIET_RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    use_token(os.environ)
    try:
        from holdall.ray import watch as cluster_watch  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingPackageError("--ray needs ray; run \"pip install 'holdall[ray]'\"") from error
    timeout_s = min(max(interval, _SHORTEST_TIMEOUT_S), _LONGEST_TIMEOUT_S)
    monitor = cluster_watch.ClusterMonitor(target[0] if target else None, timeout_s)
    turns = cluster_watch.ClusterWatch(monitor, interval)
    try:
        with outputs, contextlib.suppress(KeyboardInterrupt):
            outputs.show(
                _cluster_passes(turns), turns.header(), lambda turn, width: cluster_view(turn, turns.history, width)
            )
    finally:
        monitor.close()


def _cluster_passes(turns: ClusterWatch) -> Iterator[ClusterPass]:
    while True:
        yield turns.take()
        turns.pause()


def cluster_view(turn: ClusterPass, history: ReadingHistory, width: int = 80) -> RenderableType:
    """Return a turn as it is shown."""
    lines: list[RenderableType] = [_cluster_headline(turn, history, width)]
    lines += [verdict_line(verdict) for verdict in turn.verdicts]  # first: a screen may end before the shards do
    if not turn.memories:
        lines.append(Text("no memory runs here"))
    for memory, rate in zip(turn.memories, turn.rates, strict=True):
        lines += [Text(), *_memory_summary(memory, rate), _shards_table(memory, width)]
    return Group(*lines)


def _cluster_headline(turn: ClusterPass, history: ReadingHistory, width: int) -> Text:
    left = f"ray {turn.address}  {counted(turn.nodes, 'node')}"
    middle = f"  {format_bytes(turn.reading.pss)} (peak {format_bytes(turn.reading.peak)})  "
    text = Text(no_wrap=True, overflow="crop").append(left, style="bold").append(middle)
    return text.append(curve_of(history, max(width - len(left) - len(middle), 8)), style="cyan")


def _memory_summary(memory: SeenMemory, rate: float) -> list[Text]:
    known = [shard.status for shard in memory.shards if shard.status is not None]
    answering = sum(shard.answers for shard in memory.shards)
    transitions = sum(0 if status.counters is None else status.counters.transitions for status in known)
    capacity = sum(status.capacity for status in known)
    held, plain = (sum(getattr(status, name) for status in known) for name in ("held_bytes", "plain_bytes"))
    first = Text(memory.name, style="bold", no_wrap=True, overflow="ellipsis")
    durable = "" if not known else ", durable" if known[0].is_durable else ", not durable"
    first.append(f"  {answering} of {counted(len(memory.shards), 'shard')} answer{durable}", style="default")
    if not known:
        return [first]
    words = [f"{transitions:,} of {capacity:,} transitions ({100 * transitions / max(1, capacity):.0f} %)"]
    if rate:
        words.append(f"{rate:,.0f}/s")
    if held:
        words.append(f"{format_bytes(held)} for {format_bytes(plain)} plain ({plain / held:.1f} x)")
    lines = [first, Text("  ".join(words), style="default")]
    if memory.limiter:
        limiter = memory.limiter
        ratio = limiter["sampled"] / max(1.0, limiter["inserted"])
        within = f"within {limiter['lowest']:,.0f} and {limiter['highest']:,.0f}"
        lines.append(Text(f"limiter: {ratio:.2f} samples an insert, error {limiter['error']:,.0f} {within}"))
    return lines


def _shards_table(memory: SeenMemory, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    shown = [at for at, name in enumerate(_COLUMNS) if width >= _WIDE or name not in {"full", "PSS"}]
    for name in (_COLUMNS[at] for at in shown):
        if name == "node":
            table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=9)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=len("restarts"))
    for shard in memory.shards:
        every = _shard_cells(shard)
        cells = [every[at] for at in shown]
        colour = _STATE_COLOURS.get(shard.state, _UNREACHABLE_COLOUR)
        table.add_row(*cells, Text(shard.state, style=colour), style="" if shard.answers else "dim")
    return table


def _shard_cells(shard: SeenShard) -> list[str]:
    """Return what a shard said last, in the order of the columns."""
    status = shard.status
    if status is None or status.counters is None:
        return [str(shard.number), *[""] * 9]
    held = status.counters.transitions
    sizes = map(format_bytes, (status.held_bytes, status.uss_bytes, status.pss_bytes))
    full, of_limit = held / max(1, status.capacity), status.uss_bytes / max(1, status.limit_bytes)
    cells = [str(shard.number), status.node, str(status.pid), f"{held:,}", f"{100 * full:.0f} %", *sizes]
    return [*cells, f"{100 * of_limit:.1f} %", format_bytes(status.counters.backlog)]
