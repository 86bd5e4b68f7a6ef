"""Harms checkpoints, and holds everything that reads or writes them to one rule, in a process of its own.

The rule: `load` gives, bit for bit, a state that was acknowledged, and none older than the newest whose files are all
as they were written; or it raises an error of holdall's. Rows that cannot be read are refused, never made up. `ls`,
`verify` and `gc` end without a traceback. The next save is refused, or what it acknowledged loads. Nothing hangs, takes
much memory, or touches a file that is not holdall's. A forged manifest whose sums are right may say anything that makes
sense.

`python -m tests.fuzz.checkpoint_cases make FOLDER` writes the checkpoints that are harmed;
`python -m tests.fuzz.checkpoint_cases run FOLDER SEED COUNT` runs cases and ends with 1 if the rule was broken. One
case is run again by its seed, with COUNT 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import pickle
import re
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from typer.main import get_group

from holdall import HoldallError, ReplayMemory
from holdall.cli.checkpoint import checkpoint

from .harm import FORGERIES, HARMS
from .templates import KINDS, Content, Template, content_of, make, rows_of

HANG_S = int(os.environ.get("HOLDALL_FUZZ_HANG_S", "60"))
COMMANDS = get_group(checkpoint)
MOST_BYTES = 5 * 2**29
"""By which a case may let the process grow: what one record may claim, and a little."""
MOST_ADDRESSES = 2**35
"""Memory that is reserved and never touched costs nothing, but it is limited, too."""
OWN_NAMES = re.compile(
    r"LOCK|segments|manifests|shards|[0-9]{5}|[0-9a-f]{16}-[0-9a-f]{16}\.seg|[0-9]{16}\.json"
    r"|([0-9a-f]{16}-[0-9a-f]{16}\.seg|[0-9]{16}\.json)\.[0-9a-f]{16}\.tmp"
)


class BrokenRuleError(AssertionError):
    """What happened is not what the rule says."""


@dataclass
class Case:
    """One harmed directory, and what is done with it."""

    template: Template
    folder: Path
    seed: int
    generator: Random = field(init=False)
    harms: list[str] = field(default_factory=list)
    is_forged: bool = False

    def __post_init__(self) -> None:
        self.generator = Random(self.seed)
        self.run_dir, self.outside = self.folder / "run", self.folder / "outside"

    # ------------------------------------------------------------ the course of a case

    def run(self) -> None:
        """Harm a copy, and use it."""
        shutil.copytree(self.template.run, self.run_dir)
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "victim.txt").write_text("not holdall's")
        (self.outside / "folder" / "victim.txt").write_text("not holdall's")
        live = self.load() if self.generator.random() < 0.3 and self.template.name != "shards" else None
        try:
            self.harm()
            outside = _seen(self.outside)
            foreign = self.foreign()
            intact = self.newest_intact()
            self.require_load(intact)
            if self.generator.random() < 0.3:
                self.require_recovered()
            self.use_the_command_line(intact)
            self.require_save(live)
        finally:
            if live is not None:
                live.close()
        if _seen(self.outside) != outside:
            raise BrokenRuleError(f"outside of the directory: {outside} became {_seen(self.outside)}")
        after = self.foreign()
        if lost := sorted(name for name in foreign if after.get(name) != foreign[name]):
            raise BrokenRuleError(f"files that are not holdall's are gone or others: {lost}")

    def harm(self) -> None:
        """Do one to three kinds of harm."""
        for _ in range(self.generator.choice([1, 1, 1, 2, 3])):
            forges = self.generator.random() < 0.4
            one = self.generator.choice(FORGERIES if forges else HARMS)
            self.is_forged |= forges
            try:
                self.harms.append(one(self.run_dir, self.outside, self.generator))
            except (OSError, RecursionError) as error:
                self.harms.append(f"{one.__name__} could not be done ({error})")

    def newest_intact(self) -> int | None:
        """Return the newest checkpoint of which every file is what it was, and where it was."""
        return max((number for number in self.template.needs if self._is_intact(number)), default=None)

    def _is_intact(self, number: int) -> bool:
        return all(self._file_is_intact(name) for name in self.template.needs[number])

    def _file_is_intact(self, name: str) -> bool:
        path = self.run_dir / name
        if not path.is_file() or path.resolve() != self.run_dir.resolve() / name:
            return False
        raw = path.read_bytes()
        original = (self.template.run / name).read_bytes()
        return raw == original or (name.endswith(".seg") and raw.startswith(original))

    def foreign(self) -> dict[str, Any]:
        """Return the entries of the directory whose names are not holdall's."""
        seen = _seen(self.run_dir)
        return {name: what for name, what in seen.items() if not all(map(OWN_NAMES.fullmatch, Path(name).parts))}

    # ------------------------------------------------------------ load

    def load(self, **arguments: Any) -> ReplayMemory:
        """Load what is there."""
        return ReplayMemory.load(self.run_dir, **self.template.kind.arguments(), **arguments)

    def require_load(self, intact: int | None) -> None:
        """Load. What comes is a state that was acknowledged, or an error."""
        try:
            memory = self.load()
        except HoldallError as error:
            if intact is not None and not self.is_forged:
                raise BrokenRuleError(
                    f"checkpoint {intact} is as it was written, and is not loaded: {error}"
                ) from error
            return
        with memory:
            self.require_state(memory, intact)

    def require_state(self, memory: ReplayMemory, intact: int | None) -> None:
        """Hold what was loaded against what was acknowledged."""
        try:
            found = content_of(memory)
        except HoldallError:
            self.require_rows_left(memory)
            return
        numbers = [number for number, content in self.template.holds.items() if content == found]
        if not numbers and not self.is_forged:
            raise BrokenRuleError(f"{_difference(found, self.template.holds)}")
        if intact is not None and max(numbers, default=intact) < intact:
            raise BrokenRuleError(f"checkpoint {numbers} was loaded, and {intact} is as it was written")

    def require_rows_left(self, memory: ReplayMemory) -> None:
        """Read every transition alone. It is refused, or is what was added."""
        states = self.template.holds.values()
        right = {row for content in states for row in _rows(content)}
        every = np.arange(memory.first_id, min(memory.next_id, memory.first_id + 300))
        for number in every[memory.are_valid(every)].tolist():
            try:
                rows = rows_of(memory, np.array([number]))
            except HoldallError:
                continue
            if not self.is_forged and tuple(row.tobytes() for row in rows.values()) not in right:
                raise BrokenRuleError(f"transition {number} is none that was added")

    def require_recovered(self) -> None:
        """Load what is left of a damaged checkpoint. All of it is right."""
        try:
            memory = self.load(recover=True)
        except HoldallError:
            return
        with memory:
            if self.template.name != "shards":  # there, lanes that lost rows are cut, and marked as truncated
                self.require_rows_left(memory)

    # ------------------------------------------------------------ the command line, and the next save

    def use_the_command_line(self, intact: int | None) -> None:
        """List, check and clean up."""
        self.command("ls")
        self.command("ls", "--json")
        self.command("verify", *self.generator.choice([[], ["--json"]]))
        if self.generator.random() < 0.4:
            self.command("gc", "--keep", str(self.generator.choice([1, 3])))
            self.require_load(None if self._rots() else intact)

    def command(self, name: str, *arguments: str) -> None:
        """Run a command. Errors are one line."""
        nowhere = io.StringIO()
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                COMMANDS.main([name, str(self.run_dir), *arguments], prog_name="holdall checkpoint")
        except SystemExit:
            return
        except Exception as error:
            raise BrokenRuleError(f"{name} ended with {_short(error)}") from error

    def require_save(self, live: ReplayMemory | None) -> None:
        """Save once more, from a memory that was there before or was loaded now. What is acknowledged loads."""
        memory = live
        if memory is None and self.template.name != "shards":
            try:
                memory = self.load()
            except HoldallError:
                memory = self.template.kind.new(self.folder)
        if memory is None:
            return
        try:
            for _ in range(self.generator.choice([1, 3, 20])):
                self.template.kind.add(memory, memory.next_id // memory.num_envs)
            memory.save(self.run_dir, attach={"agent.pth": b"the last"}).result(HANG_S)
        except HoldallError:
            return
        else:
            self._require_saved(memory)
        finally:
            if memory is not live:
                memory.close()

    def _require_saved(self, memory: ReplayMemory) -> None:
        try:
            expected = content_of(memory) | {"attached": {"agent.pth": b"the last"}}
        except HoldallError:
            return  # blocks that were loaded from here are damaged, and are refused
        memory.close()
        try:
            with self.load() as again:
                found = content_of(again)
        except HoldallError as error:
            if self._rots():
                return
            raise BrokenRuleError(f"a save was acknowledged and does not load: {error}") from error
        if found != expected and not self._rots():
            raise BrokenRuleError(
                f"a save was acknowledged, and something else is loaded: {_difference(found, {0: expected})}"
            )

    @staticmethod
    def require_little_memory(grown: int) -> None:
        """Refuse what takes much memory."""
        if grown > MOST_BYTES:
            raise BrokenRuleError(f"{grown / 2**20:.0f} MiB more memory were taken")

    def _rots(self) -> bool:
        """Whether a file has its length and other bytes: a save that names it again does not read it to find out."""
        names = {name for needs in self.template.needs.values() for name in needs if name.endswith(".seg")}
        sizes = {name: (self.template.run / name).stat().st_size for name in names}
        there = [name for name in names if (self.run_dir / name).is_file()]
        return any((self.run_dir / n).stat().st_size >= sizes[n] and not self._file_is_intact(n) for n in there)


def _seen(folder: Path) -> dict[str, Any]:
    """Return everything below a folder: links and their targets, kinds of files, contents."""
    seen: dict[str, Any] = {}
    for top, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(top, name)
            shown = str(path.relative_to(folder))
            if path.is_symlink():
                seen[shown] = ("link", str(path.readlink()))
            elif path.is_file():
                seen[shown] = path.read_bytes()
            else:
                seen[shown] = "folder" if path.is_dir() else "special"
    return seen


def _rows(content: Content) -> set[tuple[bytes, ...]]:
    """Cut a state into its transitions."""
    count = len(content["ids"]) // 8
    fields = [rows for name, rows in content.items() if name not in {"ids", "lanes", "attached", "draws"}]
    cut = [[rows[i * len(rows) // count :][: len(rows) // count] for i in range(count)] for rows in fields if count]
    return set(zip(*cut, strict=True))


def _difference(found: Content, states: dict[int, Content]) -> str:
    wrong = {number: [key for key in content if content[key] != found.get(key)] for number, content in states.items()}
    return f"what was loaded is none of the states that were acknowledged; these differ: {wrong}"


def _short(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "holdall" in frame.filename] or frames[-1:]
    return f"{type(error).__name__}: {str(error)[:900]} at {Path(own[-1].filename).name}:{own[-1].lineno}"


# ---------------------------------------------------------------- the process


def _peak_bytes() -> int:
    """Return the most memory that was resident since this was last asked."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def run_case(template: Template, seed: int, tell: Callable[[str], None]) -> bool:
    """Run one case. Return whether the rule held."""
    before = _peak_bytes()
    with tempfile.TemporaryDirectory(prefix="holdall-fuzz-") as folder:
        case = Case(template, Path(folder), seed)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            case.run()
            case.require_little_memory(_peak_bytes() - before)
        except BaseException as error:
            tell(f"BROKEN {template.name} seed {seed}: {case.harms}: {_short(error)}\n{traceback.format_exc()}")
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
    return True


def main(arguments: list[str]) -> int:
    """Make templates, or run cases."""
    what = arguments[0]
    folder = Path(arguments[1])
    logging.getLogger("holdall").setLevel(logging.CRITICAL)
    if what == "make":
        for name in KINDS:
            (folder / name).mkdir(parents=True)
            make(name, folder / name)
        return 0
    first = int(arguments[2])
    count = int(arguments[3])
    templates = [pickle.loads((folder / name / "template.pickle").read_bytes()) for name in KINDS]
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    held = 0
    for seed in range(first, first + count):
        template = templates[Random(seed).choice([0, 0, 1, 1, 2])]
        sys.stdout.write(f"{template.name} seed {seed}\n")
        sys.stdout.flush()
        held += run_case(template, seed, lambda text: print(text, flush=True))  # noqa: T201
    savers = [thread for thread in threading.enumerate() if thread.name.startswith("holdall-sav")]
    for saver in savers:
        saver.join(HANG_S)
    left = [saver.name for saver in savers if saver.is_alive()]
    print(f"{held} of {count} cases held; threads left: {left}", flush=True)  # noqa: T201
    return int(held < count or bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
