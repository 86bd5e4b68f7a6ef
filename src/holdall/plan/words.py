"""Words and numbers of a plan, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdall.plan.planned import Plan
from holdall.plan.spec import Spec

_GB, _GIB, _MB, _MIB = 10**9, 2**30, 10**6, 2**20


def both_units(count: int) -> str:
    """Write bytes in decimal and binary units, both named: `12.79 GB = 11.91 GiB`."""
    if count >= _GB / 10:
        return f"{count / _GB:.2f} GB = {count / _GIB:.2f} GiB"
    return f"{count / _MB:.1f} MB = {count / _MIB:.1f} MiB"


class Units(NamedTuple):
    """The decimal and the binary unit of a column, named once in its head."""

    decimal: str
    binary: str

    @classmethod
    def for_largest(cls, sizes: Iterable[int]) -> Units:
        """Choose the units in which the largest of the sizes is a handy number."""
        return cls("GB", "GiB") if max(sizes, default=0) >= _GB / 10 else cls("MB", "MiB")

    def both(self, count: int) -> tuple[str, str]:
        """Write a count of bytes in either unit, without its name."""
        decimal, binary = (_GB, _GIB) if self.decimal == "GB" else (_MB, _MIB)
        return f"{count / decimal:,.2f}", f"{count / binary:,.2f}"


def size_name(size: int) -> str:
    """Write a count; none is a dash."""
    return f"{size:,}" if size else "-"


def row_name(spec: Spec) -> str:
    """Say what the table's sizes count."""
    return "Steps" if spec.on_policy else "Capacity"


def heading(plan: Plan) -> str:
    """Name the run in one line."""
    spec = plan.spec
    size = f"{spec.rollout_steps:,} steps" if spec.on_policy else f"{spec.capacity:,} transitions"
    envs = f"{spec.num_envs} environment{'s' if spec.num_envs > 1 else ''}"
    called = f"{spec.name}: " if spec.name else ""
    return f"{called}{spec.algorithm.class_name}, {spec.policy_name}, {size}, {envs}, batches of {spec.batch:,}"


def largest_sizes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Name the largest sizes that fit, all else as it is."""
    size = row_name(plan.spec).lower()
    names = {
        "sb3_size": f"{size} with SB3's buffer",
        "holdall_size": f"{size} with holdall's",
        "batch_size": "batch",
        "num_envs": "environments",
    }
    for key, name in names.items():
        found = plan.largest[key]
        if found is not None:
            yield name, f"{found:,}" if found else "none"
