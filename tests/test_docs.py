"""The programs in docs/ run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dqn_with_priorities_in_samplers_md_learns_and_tells_its_errors() -> None:
    """The whole program under "In Stable-Baselines3"."""
    programs = re.findall(r"```python\n(.*?)```", (DOCS / "samplers.md").read_text(), re.DOTALL)
    program = next(text for text in programs if "import PrioritizedDQN" in text)
    names: dict[str, object] = {}
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


def test_the_loop_in_rollouts_md_collects_and_reads_three_rollouts() -> None:
    """The whole program under "In your own loop"."""
    programs = re.findall(r"```python\n(.*?)```", (DOCS / "rollouts.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(programs[0], "docs/rollouts.md", "exec"), names)
    assert names["rollout"].is_full  # type: ignore[attr-defined]  # made by the program
    assert names["update"] == 2


def test_the_examples_in_extending_md_keep_the_contracts() -> None:
    """Every program runs, and every contract in them is kept."""
    names: dict[str, object] = {"__name__": "extending"}
    for program in re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL):
        exec(compile(program, "docs/extending.md", "exec"), names)
    contracts = [kind for name, kind in names.items() if name.startswith("Test") and isinstance(kind, type)]
    assert [kind.__name__ for kind in contracts] == ["TestNewest", "TestSlowZstandard", "TestPushBuffer"]
    for kind in contracts:
        rules = [rule for rule in dir(kind) if rule.startswith("test_")]
        assert rules
        for rule in rules:
            getattr(kind(), rule)()
