"""Run the slow suites one after another within a time limit, and say what ran, what was skipped and what failed.

    python release/nightly.py                          # everything, within two hours: `make nightly`
    python release/nightly.py --minutes 30 --only crash fuzz shards
    python release/nightly.py --list

Suites run in the order of the list. When the time of a suite is over, it is ended, and the table says so. Its tests
that were completed count. The time that a suite leaves is shared among the later ones. The logs are in .cache/nightly.
The exit status is 1 if a test failed or a suite could not run, and 0 if not. Suites that had no time left do not fail.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".cache" / "nightly"
TWO_HOURS = 120.0
RESULT = re.compile(r"^(?P<test>\S+::.*?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
"""A line of pytest's log. The log is read in place of a report, because a suite that is ended writes none."""
MIN_SUITE_S = 20.0
"""A suite with less time is not started."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that run in one call of pytest."""

    name: str
    share: float  # Of the whole time. Unused time goes to later suites.
    arguments: tuple[str, ...]


OWN_SUITES = ("test_interrupts.py", "test_kills.py", "test_lerobot_kills.py")
"""Files of tests/crash that are suites of their own."""
SUITES = (
    Suite("kills", 0.12, ("tests/crash/test_kills.py", "tests/crash/test_lerobot_kills.py", "-m", "nightly")),
    Suite("crash", 0.16, ("tests/crash", "-m", "nightly", *(f"--ignore=tests/crash/{name}" for name in OWN_SUITES))),
    Suite("fuzz", 0.14, ("tests/fuzz", "-m", "nightly")),
    Suite("property", 0.14, ("tests/property", "tests/recorder", "tests/format")),
    Suite("interrupts", 0.16, ("tests/crash/test_interrupts.py", "-m", "nightly")),
    Suite("shards", 0.14, ("tests/shards", "-m", "nightly")),
    Suite("frameworks", 0.1, ("tests/integration", "-m", "nightly")),
    Suite("rest", 0.04, ("tests/unit", "tests/test_code_blocks.py", "tests/test_site.py", "-m", "nightly")),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one suite."""

    suite: Suite
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    note: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether a test failed, or the suite itself."""
        return bool(self.failed) or self.note.startswith("pytest")


def main() -> int:
    """Run the suites, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=TWO_HOURS, help="time for all suites together")
    parser.add_argument("--only", nargs="+", choices=[suite.name for suite in SUITES], help="suites to run")
    parser.add_argument("--list", action="store_true", help="print the suites and their tests")
    options = parser.parse_args()
    suites = [suite for suite in SUITES if options.only is None or suite.name in options.only]
    if options.list:
        for suite in suites:
            print(f"{suite.name:12}{' '.join(suite.arguments)}")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(suites, options.minutes * 60)
    print_table(outcomes)
    return int(any(outcome.has_failed for outcome in outcomes))


def run_all(suites: list[Suite], seconds: float) -> list[Outcome]:
    """Run every suite, each within its share of the time that is left."""
    end = time.monotonic() + seconds
    outcomes = []
    for index, suite in enumerate(suites):
        shares = sum(other.share for other in suites[index:])
        limit_s = (end - time.monotonic()) * suite.share / shares
        if limit_s < MIN_SUITE_S:
            outcomes.append(Outcome(suite, note="not run: no time was left"))
            continue
        print(f"{suite.name}: at most {limit_s / 60:.0f} minutes, log in {LOGS / suite.name}.txt", flush=True)
        outcomes.append(run_suite(suite, limit_s))
    return outcomes


def run_suite(suite: Suite, limit_s: float) -> Outcome:
    """Run one suite. End it after `limit_s`."""
    command = [sys.executable, "-m", "pytest", "--timeout=3600", "-v", *suite.arguments]
    environment = {"HYPOTHESIS_PROFILE": "nightly"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    log_file = LOGS / f"{suite.name}.txt"
    begun = time.monotonic()
    note = ""
    with log_file.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            if status not in (0, 1, 5):  # 1: tests failed, and the log says which; 5: no test was selected.
                note = f"pytest ended with status {status}"
        except subprocess.TimeoutExpired:
            note = "cut off: its time was over"
        finally:
            end_group(process)
    return read_log(suite, log_file, time.monotonic() - begun, note)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End pytest and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_log(suite: Suite, log_file: Path, seconds: float, note: str) -> Outcome:
    """Count the tests in pytest's log."""
    found = list(RESULT.finditer(log_file.read_text(encoding="utf-8", errors="replace")))
    outcomes = [match["outcome"] for match in found]
    failed = tuple(dict.fromkeys(match["test"] for match in found if match["outcome"] in ("FAILED", "ERROR")))
    skipped = outcomes.count("SKIPPED") + outcomes.count("XFAIL")
    return Outcome(suite, outcomes.count("PASSED"), skipped, failed, seconds, note)


def print_table(outcomes: list[Outcome]) -> None:
    """Print a row for each suite, the names of failed tests, and the sum."""
    print(f"\n{'suite':12}{'passed':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for outcome in outcomes:
        counts = f"{outcome.passed:8}{outcome.skipped:9}{len(outcome.failed):8}{outcome.seconds:9.0f}"
        print(f"{outcome.suite.name:12}{counts}  {outcome.note}".rstrip())
    for outcome in outcomes:
        for name in outcome.failed:
            print(f"FAILED {outcome.suite.name}: {name}")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(len(outcome.failed) for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    sys.exit(main())
