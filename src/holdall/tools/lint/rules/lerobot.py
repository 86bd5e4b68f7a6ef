"""Rules about LeRobot's replay buffer: rows that get a wrong next state."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from holdall.tools.lint.arguments import OPTIMIZE_MEMORY, OPTIMIZE_MEMORY_OF_DATASET
from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.source import Source

_LEARNER = "lerobot.rl.learner.train_cli"
_INSTALL = "holdall.lerobot.install"
_FROM_DATASET = ".from_lerobot_dataset"


def _is_lerobot_buffer(name: str) -> bool:
    return name.startswith("lerobot.") and name.endswith(".ReplayBuffer")


class LerobotOptimizeMemory(Rule):
    """Finds LeRobot's buffer with `optimize_memory=True`, and its learner, which sets it.

    Why: The next state of a row is then the state of the row that was added after it. At a time limit, that is the
    first state of the next episode. Before steps that were not added, it is a later state. Both are learned from.
    Fix: `holdall.lerobot.ReplayBuffer`, which stores every state once and has the right next state in every row. For
    the learner, `holdall.lerobot.install()` before `train_cli()`.

    Bad:
        from lerobot.rl.buffer import ReplayBuffer
        buffer = ReplayBuffer(capacity=100_000, device="cuda", optimize_memory=True)

    Good:
        from holdall.lerobot import ReplayBuffer
        buffer = ReplayBuffer(capacity=100_000, device="cuda", optimize_memory=True)
    """

    code = "L21"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for calls that make such a buffer."""
        is_installed = any(source.find_calls(_INSTALL))
        for call in source.calls:
            name = source.get_full_name(call.func)
            if name == _LEARNER and not is_installed:
                yield Match(
                    "LeRobot's learner makes its buffers with optimize_memory=True, which gives rows at time limits "
                    "the next state of another episode; call holdall.lerobot.install() before it",
                    source.get_place(call),
                )
            if not _is_lerobot_buffer(name.removesuffix(_FROM_DATASET)):
                continue
            argument = OPTIMIZE_MEMORY_OF_DATASET if name.endswith(_FROM_DATASET) else OPTIMIZE_MEMORY
            if source.evaluate(argument.find(call)) is True:
                yield Match(
                    "optimize_memory=True: rows at time limits and before skipped steps get the state of a later "
                    "step as their next state; holdall.lerobot.ReplayBuffer stores the right next states",
                    source.get_place(call),
                )


class InterventionSegments(Rule):
    """Finds steps that are added to one of LeRobot's buffers only if a person intervened.

    Why: With `optimize_memory=True`, the last row of an intervention gets the first state of the next intervention as
    its next state, minutes later, and the value of that state is learned.
    Fix: `holdall.lerobot.ReplayBuffer`, which stores the next state of every row.

    Bad:
        from lerobot.rl.buffer import ReplayBuffer
        def process(transitions, replay_buffer: ReplayBuffer, offline_replay_buffer: ReplayBuffer):
            for transition in transitions:
                replay_buffer.add(**transition)
                if transition["complementary_info"]["is_intervention"]:
                    offline_replay_buffer.add(**transition)

    Good:
        from holdall.lerobot import ReplayBuffer
        def process(transitions, offline_replay_buffer: ReplayBuffer):
            for transition in transitions:
                if transition["complementary_info"]["is_intervention"]:
                    offline_replay_buffer.add(**transition)
    """

    code = "L22"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `add` in a branch whose condition names an intervention."""
        if not any(_is_lerobot_buffer(name) for name in source.imports.values()):
            return
        for call, owner in source.find_method_calls("add"):
            if "buffer" not in ast.unparse(owner).lower():
                continue
            branches = (parent for parent in source.ancestors(call) if isinstance(parent, ast.If))
            if any("intervention" in ast.unparse(branch.test).lower() for branch in branches):
                yield Match(
                    f"{ast.unparse(owner)} gets the steps of interventions only; with optimize_memory=True, the last "
                    "step of each intervention gets the first state of the next one as its next state; "
                    "holdall.lerobot.ReplayBuffer stores the right one",
                    source.get_place(call),
                )
