"""Damage checkpoints, and check one rule for everything that reads or writes them. This script runs as a process.

The rule has these parts:

- `load` returns an acknowledged state, bit for bit, or raises an error of holdall. The state is at least as new as the
  newest checkpoint whose files are unchanged.
- Rows that cannot be read are refused.
- `ls`, `verify` and `gc` end without a traceback.
- The next save is refused, or its checkpoint can be loaded.
- No call hangs, takes much memory, or changes a file that is not holdall's.

A forged manifest with correct checksums may make any claim that is consistent.

`python -m tests.fuzz.checkpoint_cases make FOLDER` writes the checkpoints that are damaged.
`python -m tests.fuzz.checkpoint_cases run FOLDER SEED COUNT` runs cases, and exits with 1 if the rule was broken. To
repeat one case, pass its seed and COUNT 1.
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
from .templates import KINDS, Content, Template, make_template, read_content, read_rows

HANG_S = int(os.environ.get("HOLDALL_FUZZ_HANG_S", "60"))
COMMANDS = get_group(checkpoint)
MAX_GROWTH_BYTES = 5 * 2**29
"""Bytes by which the process may grow in one case: a little more than one record may have."""
MAX_ADDRESS_BYTES = 2**35
"""Limit of the address space. It also covers memory that is reserved and never touched."""
OWN_NAMES = re.compile(
    r"LOCK|segments|manifests|shards|[0-9]{5}|[0-9a-f]{16}-[0-9a-f]{16}\.seg|[0-9]{16}\.json"
    r"|([0-9a-f]{16}-[0-9a-f]{16}\.seg|[0-9]{16}\.json)\.[0-9a-f]{16}\.tmp"
)


class BrokenRuleError(AssertionError):
    """The rule was broken."""


@dataclass
class Case:
    """One damaged directory, and the calls that use it."""

    template: Template
    folder: Path
    seed: int
    generator: Random = field(init=False)
    harms: list[str] = field(default_factory=list)
    is_forged: bool = False

    def __post_init__(self) -> None:
        self.generator = Random(self.seed)
        self.run_dir = self.folder / "run"
        self.outside = self.folder / "outside"

    # ------------------------------------------------------------ one case

    def run(self) -> None:
        """Damage a copy of the template, and use it."""
        shutil.copytree(self.template.run, self.run_dir)
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "victim.txt").write_text("not holdall's")
        (self.outside / "folder" / "victim.txt").write_text("not holdall's")
        live = self.load() if self.generator.random() < 0.3 and self.template.name != "shards" else None
        try:
            self.harm()
            outside = _describe_folder(self.outside)
            foreign = self.list_foreign_entries()
            intact = self.find_newest_intact()
            self.require_load(intact)
            if self.generator.random() < 0.3:
                self.require_recovered()
            self.use_the_command_line(intact)
            self.require_save(live)
        finally:
            if live is not None:
                live.close()
        if _describe_folder(self.outside) != outside:
            raise BrokenRuleError(f"outside of the directory: {outside} became {_describe_folder(self.outside)}")
        after = self.list_foreign_entries()
        if lost := sorted(name for name in foreign if after.get(name) != foreign[name]):
            raise BrokenRuleError(f"files that are not holdall's were removed or changed: {lost}")

    def harm(self) -> None:
        """Apply one to three kinds of damage."""
        for _ in range(self.generator.choice([1, 1, 1, 2, 3])):
            forges = self.generator.random() < 0.4
            one = self.generator.choice(FORGERIES if forges else HARMS)
            self.is_forged |= forges
            try:
                self.harms.append(one(self.run_dir, self.outside, self.generator))
            except (OSError, RecursionError) as error:
                self.harms.append(f"{one.__name__} could not be done ({error})")

    def find_newest_intact(self) -> int | None:
        """Return the number of the newest checkpoint whose files are all unchanged."""
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

    def list_foreign_entries(self) -> dict[str, Any]:
        """Return the entries of the directory whose names are not holdall's."""
        seen = _describe_folder(self.run_dir)
        return {name: what for name, what in seen.items() if not all(map(OWN_NAMES.fullmatch, Path(name).parts))}

    # ------------------------------------------------------------ load

    def load(self, **arguments: Any) -> ReplayMemory:
        """Load the damaged directory."""
        return ReplayMemory.load(self.run_dir, **self.template.kind.arguments(), **arguments)

    def require_load(self, intact: int | None) -> None:
        """Require that `load` returns an acknowledged state or raises an error of holdall."""
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
        """Require that a loaded memory has an acknowledged state."""
        try:
            found = read_content(memory)
        except HoldallError:
            self.require_rows_left(memory)
            return
        numbers = [number for number, content in self.template.holds.items() if content == found]
        if not numbers and not self.is_forged:
            raise BrokenRuleError(f"{_describe_difference(found, self.template.holds)}")
        if intact is not None and max(numbers, default=intact) < intact:
            raise BrokenRuleError(f"checkpoint {numbers} was loaded, and {intact} is as it was written")

    def require_rows_left(self, memory: ReplayMemory) -> None:
        """Read every transition by itself. Require that it is refused or right."""
        states = self.template.holds.values()
        right = {row for content in states for row in _split_transitions(content)}
        every = np.arange(memory.first_id, min(memory.next_id, memory.first_id + 300))
        for number in every[memory.are_valid(every)].tolist():
            try:
                rows = read_rows(memory, np.array([number]))
            except HoldallError:
                continue
            if not self.is_forged and tuple(row.tobytes() for row in rows.values()) not in right:
                raise BrokenRuleError(f"transition {number} was never added")

    def require_recovered(self) -> None:
        """Require that every transition of a recovered memory is right."""
        try:
            memory = self.load(recover=True)
        except HoldallError:
            return
        with memory:
            if self.template.name != "shards":  # Lanes of shards that lost rows are cut and marked as truncated.
                self.require_rows_left(memory)

    # ------------------------------------------------------------ the command line, and the next save

    def use_the_command_line(self, intact: int | None) -> None:
        """Run `ls`, `verify` and sometimes `gc`."""
        self.command("ls")
        self.command("ls", "--json")
        self.command("verify", *self.generator.choice([[], ["--json"]]))
        if self.generator.random() < 0.4:
            self.command("gc", "--keep", str(self.generator.choice([1, 3])))
            self.require_load(None if self._has_silent_damage() else intact)

    def command(self, name: str, *arguments: str) -> None:
        """Run a command. Require that it ends without a traceback."""
        nowhere = io.StringIO()
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                COMMANDS.main([name, str(self.run_dir), *arguments], prog_name="holdall checkpoint")
        except SystemExit:
            return
        except Exception as error:
            raise BrokenRuleError(f"{name} ended with {_format_error(error)}") from error

    def require_save(self, live: ReplayMemory | None) -> None:
        """Save once more. Require that the save is refused or that its checkpoint can be loaded."""
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
            expected = read_content(memory) | {"attached": {"agent.pth": b"the last"}}
        except HoldallError:
            return  # Blocks that this memory loaded are damaged.
        memory.close()
        try:
            with self.load() as again:
                found = read_content(again)
        except HoldallError as error:
            if self._has_silent_damage():
                return
            raise BrokenRuleError(f"a save was acknowledged and does not load: {error}") from error
        if found != expected and not self._has_silent_damage():
            raise BrokenRuleError(
                f"a save was acknowledged, and something else is loaded: {_describe_difference(found, {0: expected})}"
            )

    @staticmethod
    def require_little_memory(grown: int) -> None:
        """Require that the process did not grow much."""
        if grown > MAX_GROWTH_BYTES:
            raise BrokenRuleError(f"{grown / 2**20:.0f} MiB more memory were taken")

    def _has_silent_damage(self) -> bool:
        """Return whether a file has its size but other bytes. A later save names such a file without reading it."""
        names = {name for needs in self.template.needs.values() for name in needs if name.endswith(".seg")}
        sizes = {name: (self.template.run / name).stat().st_size for name in names}
        there = [name for name in names if (self.run_dir / name).is_file()]
        return any((self.run_dir / n).stat().st_size >= sizes[n] and not self._file_is_intact(n) for n in there)


def _describe_folder(folder: Path) -> dict[str, Any]:
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


def _split_transitions(content: Content) -> set[tuple[bytes, ...]]:
    """Split a state into its transitions."""
    count = len(content["ids"]) // 8
    fields = [rows for name, rows in content.items() if name not in {"ids", "lanes", "attached", "draws"}]
    cut = [[rows[i * len(rows) // count :][: len(rows) // count] for i in range(count)] for rows in fields if count]
    return set(zip(*cut, strict=True))


def _describe_difference(found: Content, states: dict[int, Content]) -> str:
    wrong = {number: [key for key in content if content[key] != found.get(key)] for number, content in states.items()}
    return f"the loaded state was never acknowledged; it differs from each acknowledged one in: {wrong}"


def _format_error(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "holdall" in frame.filename] or frames[-1:]
    return f"{type(error).__name__}: {str(error)[:900]} at {Path(own[-1].filename).name}:{own[-1].lineno}"


# ---------------------------------------------------------------- the process


def _peak_bytes() -> int:
    """Return the largest resident memory since the last call."""
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
            tell(f"BROKEN {template.name} seed {seed}: {case.harms}: {_format_error(error)}\n{traceback.format_exc()}")
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
            make_template(name, folder / name)
        return 0
    first = int(arguments[2])
    count = int(arguments[3])
    templates = [pickle.loads((folder / name / "template.pickle").read_bytes()) for name in KINDS]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
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
