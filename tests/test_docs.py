"""The programs in docs/ run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dqn_with_priorities_in_samplers_md_learns_and_tells_its_errors() -> None:
    """All blocks, one after another; the last is the program under "In Stable-Baselines3"."""
    names: dict[str, object] = {}
    for program in re.findall(r"```python\n(.*?)```", (DOCS / "samplers.md").read_text(), re.DOTALL):
        exec(compile(program, "docs/samplers.md", "exec"), names)
    model = names["model"]
    assert model._n_updates >= 40  # type: ignore[attr-defined]  # made by the program
    scaled = model.replay_buffer.sampler.state()["scaled"]  # type: ignore[attr-defined]  # likewise
    assert len({float(number) for number in scaled[:300]}) > 100, "no errors were told"


def test_the_program_in_recurrent_md_rewrites_states_and_values() -> None:
    """All blocks, one after another: states of the last batch and values of everything are the network's own."""
    import torch

    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", (DOCS / "guides" / "recurrent.md").read_text(), re.DOTALL):
        exec(compile(program, "docs/guides/recurrent.md", "exec"), names)
    memory, some = names["memory"], names["some"]
    assert len(memory) == 500
    stored = memory.gather(some.ids).extras
    assert torch.equal(stored["value"], names["value"])
    assert not torch.equal(stored["value"], some.extras["value"])
    last = dict(zip(names["batch"].ids[names["real"]].tolist(), names["states"][names["batch"].mask], strict=True))
    assert torch.equal(memory.gather(list(last)).extras["hidden"], torch.stack(list(last.values())))


def test_the_programs_in_rollouts_md_collect_and_read_rollouts(tmp_path: Path) -> None:
    """All blocks in a process of their own: some of them fork workers."""
    programs = re.findall(r"```python\n(.*?)```", (DOCS / "rollouts.md").read_text(), re.DOTALL)
    programs[0] += "assert rollout.is_full and update == 2\n"
    programs[1] += "assert steps == 32 and states.shape == (32, 4, 8)\n"
    programs[2] += "assert rollout.is_full\n"
    programs[3] += "assert reward == (1.0,) * 4\n"
    (tmp_path / "page.py").write_text("\n".join(programs), encoding="utf-8")
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, timeout=100)


def test_the_examples_in_extending_md_keep_the_contracts() -> None:
    """Every program runs, and every contract in them is kept."""
    names: dict[str, object] = {"__name__": "extending"}
    for program in re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL):
        exec(compile(program, "docs/extending.md", "exec"), names)
    contracts = [kind for name, kind in names.items() if name.startswith("Test") and isinstance(kind, type)]
    assert [kind.__name__ for kind in contracts] == [
        "TestNewest",
        "TestSlowZstandard",
        "TestMemoryOnMyDevice",
        "TestPushBuffer",
        "TestMyStore",
    ]
    for kind in contracts:
        rules = [rule for rule in dir(kind) if rule.startswith("test_")]
        assert rules
        for rule in rules:
            getattr(kind(), rule)()
