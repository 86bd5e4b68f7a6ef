"""Run the slow suites within a time limit, and say what ran, what was skipped and what failed.

    python release/nightly.py                     # everything, within two hours: `make nightly`
    python release/nightly.py --minutes 30 --ci   # the part of it that CI runs for every change
    python release/nightly.py --minutes 20 --only crash shards
    python release/nightly.py --list

Two suites run at a time, in the order of the list. A suite whose time is over is ended: its completed tests count, and
the table says that it was not finished. Time that a suite does not need goes to the later ones. The logs are in
.cache/nightly. The exit status is 1 if a test failed or a suite could not run. A suite that was not finished, or not
started because no time was left, is not a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".cache" / "nightly"
TWO_HOURS = 120.0
LANES = 2
"""Suites that run at the same time. Most of them wait for servers and killed processes longer than they compute."""
MIN_SUITE_S = 20.0
"""A suite with less time is not started."""
SUMMARY_S = 30.0
"""Time that pytest gets to write its summary when the time of a suite is over."""
MARK = "HOLDALL_NIGHTLY_SUITE"
"""Environment variable by which the processes of a suite are found, also those that left its process group."""
RESULT = re.compile(
    r"^(?:(?P<test>tests/\S+::.*?) )?(?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL)"
    r"(?: \((?P<reason>.*)\))? *(?:\[ *\d+%\])?$"
)
"""Line of pytest's log with the outcome of a test. A suite that is ended writes no report, so the log is read."""
NAME = re.compile(r"^tests/\S+::.*")
"""Line that begins a test which prints something itself. Its outcome follows in a later line, without the name."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that run in one call of pytest."""

    name: str
    minutes: float  # Its limit in a run of two hours. In a shorter run, the limits of all suites are shorter.
    arguments: tuple[str, ...]
    is_in_ci: bool = False


def list_files(folder: str, *names: str) -> tuple[str, ...]:
    """Return the paths of test files."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


KILLS = "tests/crash/test_kills.py"
STORES = list_files("crash", "blob_stores", "object_store", "lost_answers", "waiting", "remote_load", "remote_slots")
CRASH = (
    f"{KILLS}::test_no_kill_loses_what_was_acknowledged",
    *list_files("crash", "lerobot_kills", "loads_beside_saves", "strangers"),
)
DOCS = ("tests/test_code_blocks.py", "tests/test_notebooks.py", "tests/test_site.py")
EXAMPLES = list_files("integration", "examples", "zoo")
TOOLS = ("tests/integration/plan/test_plan.py", *list_files("integration", "bench", "bench_search", "demo"))
SUITES = (
    Suite("stores", 12, STORES, is_in_ci=True),
    Suite("shards", 14, ("tests/shards", "--ignore=tests/shards/chaos"), is_in_ci=True),
    Suite("crash", 12, CRASH, is_in_ci=True),
    Suite("docs", 10, (*DOCS, *EXAMPLES), is_in_ci=True),
    Suite("chaos", 24, ("tests/shards/chaos",), is_in_ci=True),
    Suite("decoder", 12, list_files("fuzz", "sanitized", "decoder"), is_in_ci=True),
    Suite("tools", 10, TOOLS, is_in_ci=True),
    Suite("uploads", 12, (f"{KILLS}::test_no_kill_during_an_upload_loses_what_was_acknowledged",)),
    Suite("faults", 12, list_files("crash", "faults", "damage", "collectors")),
    Suite("power cuts", 16, list_files("crash", "power_cuts")),
    Suite("interrupts", 24, list_files("crash", "interrupts")),
    Suite("checkpoints", 16, list_files("fuzz", "checkpoints")),
    Suite("frameworks", 26, ("tests/integration", *(f"--ignore={file}" for file in (*EXAMPLES, *TOOLS)))),
    Suite("rest", 8, ("tests/unit",)),
    Suite("property", 24, ("tests/property", "tests/recorder", "tests/format", "-m", "nightly or not nightly")),
    Suite("leaks", 10, list_files("fuzz", "leaks")),
    Suite("soak", 10, list_files("fuzz", "soak")),
)
"""Suites that a change of the code breaks most often come first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one suite."""

    suite: Suite
    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    note: str = ""
    is_broken: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether a test failed, or the suite itself."""
        return bool(self.failed) or self.is_broken


class Schedule:
    """Time that every suite gets. Thread-safe."""

    def __init__(self, suites: list[Suite], seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._waiting = list(suites)
        self._running: dict[Suite, float] = {}
        self._lock = threading.Lock()

    def start(self, suite: Suite) -> float:
        """Return the seconds that `suite` may take, or 0 if too little time is left."""
        with self._lock:
            now = time.monotonic()
            left_s = self._end - now
            promised_s = sum(max(end - now, 0.0) for end in self._running.values())
            share = suite.minutes / sum(other.minutes for other in self._waiting)
            self._waiting.remove(suite)
            limit_s = min(left_s, max(0.0, LANES * left_s - promised_s) * share)
            if limit_s < MIN_SUITE_S:
                return 0.0
            self._running[suite] = now + limit_s
            return limit_s

    def end(self, suite: Suite) -> None:
        """Give back the time that `suite` did not need."""
        with self._lock:
            del self._running[suite]


def main() -> int:
    """Run the suites, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=TWO_HOURS, help="time for all suites together")
    parser.add_argument("--only", nargs="+", choices=[suite.name for suite in SUITES], help="suites to run")
    parser.add_argument("--ci", action="store_true", help="only the suites that CI runs for every change")
    parser.add_argument("--list", action="store_true", help="print the suites and their tests")
    options = parser.parse_args()
    suites = [suite for suite in SUITES if suite.name in (options.only or suite.name)]
    suites = [suite for suite in suites if suite.is_in_ci or not options.ci]
    if options.list:
        for suite in suites:
            print(f"{suite.name:12}{' '.join(suite.arguments)}")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that the processes of the suites are ended, too.
    # A shell ignores interrupts for commands in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes = run_all(suites, options.minutes * 60)
    print_summary(outcomes)
    return int(any(outcome.has_failed for outcome in outcomes))


def run_all(suites: list[Suite], seconds: float) -> list[Outcome]:
    """Run every suite, two at a time, and return the outcomes in the order of `suites`."""
    schedule = Schedule(suites, seconds)
    is_stopped = threading.Event()
    with ThreadPoolExecutor(LANES) as pool:
        running = [pool.submit(run_in_time, suite, schedule, is_stopped.is_set) for suite in suites]
        try:
            return [future.result() for future in running]
        except BaseException:
            is_stopped.set()
            raise


def run_in_time(suite: Suite, schedule: Schedule, is_stopped: Callable[[], bool]) -> Outcome:
    """Run one suite within the time that `schedule` gives it."""
    limit_s = schedule.start(suite)
    if limit_s == 0 or is_stopped():
        return Outcome(suite, note="not started: no time was left")
    try:
        outcome = run_suite(suite, limit_s, is_stopped)
    finally:
        schedule.end(suite)
    print(format_row(outcome), flush=True)
    return outcome


def run_suite(suite: Suite, limit_s: float, is_stopped: Callable[[], bool]) -> Outcome:
    """Run one suite. End it after `limit_s`, or when `is_stopped` says so."""
    arguments = suite.arguments if "-m" in suite.arguments else (*suite.arguments, "-m", "nightly")
    command = [sys.executable, "-m", "pytest", "--timeout=3600", "-v", "-p", "no:cacheprovider", *arguments]
    mark = secrets.token_hex(8)
    environment = (
        {"HYPOTHESIS_PROFILE": "nightly"} | os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "240", MARK: mark}
    )
    log_file = LOGS / f"{suite.name.replace(' ', '_')}.txt"
    print(f"{suite.name}: at most {limit_s / 60:.0f} minutes, log in {log_file.relative_to(ROOT)}", flush=True)
    begun = time.monotonic()
    note = ""
    is_broken = False
    with log_file.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = wait_for(process, begun + limit_s, is_stopped)
            if status is None:
                process.send_signal(signal.SIGINT)  # pytest then writes the errors of the tests that failed so far.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SUMMARY_S)
        finally:
            end_processes(process, mark)
    outcome = read_log(suite, log_file.read_text(encoding="utf-8", errors="replace"), time.monotonic() - begun)
    if status is None:
        note = "not finished: its time was over"
    elif status == 1 and not outcome.failed:
        note = "a test failed, but the log does not name it"
        is_broken = True
    elif status not in (0, 1, 5):  # 1: tests failed, and the log names them. 5: no test was selected.
        note = f"pytest ended with status {status}"
        is_broken = True
    return replace(outcome, note=note, is_broken=is_broken)


def wait_for(process: subprocess.Popen[bytes], end: float, is_stopped: Callable[[], bool]) -> int | None:
    """Return the exit status, or None if `process` still runs at `end` or when `is_stopped` says so."""
    while time.monotonic() < end and not is_stopped():
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(1.0, max(0.01, end - time.monotonic())))
    return None


def end_processes(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill pytest and everything that it started. Servers and Ray's processes are not in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(3):  # A process that was just being started is found in the next round.
        for other in psutil.process_iter():
            with suppress(psutil.Error):
                if other.environ().get(MARK) == mark:
                    other.kill()
        time.sleep(0.1)


def read_log(suite: Suite, log: str, seconds: float) -> Outcome:
    """Count the tests in pytest's log."""
    passed = 0
    skipped: Counter[str] = Counter()
    failed: dict[str, None] = {}  # Names in the order of the log.
    test = ""
    for line in log.splitlines():
        result = RESULT.match(line)
        if result is None:
            name = NAME.match(line)
            test = name[0].strip() if name else test
        elif result["outcome"] == "PASSED":
            passed += 1
        elif result["outcome"] in ("FAILED", "ERROR"):
            failed[result["test"] or test] = None
        else:
            skipped[result["reason"] or "no reason"] += 1
    return Outcome(suite, passed, skipped, tuple(failed), seconds)


def format_row(outcome: Outcome) -> str:
    """Return one row of the table."""
    counts = f"{outcome.passed:8}{outcome.skipped.total():9}{len(outcome.failed):8}{outcome.seconds:9.0f}"
    return f"{outcome.suite.name:12}{counts}  {outcome.note}".rstrip()


def print_summary(outcomes: list[Outcome]) -> None:
    """Print a row for each suite, the reasons of skipped tests, the names of failed tests, and the total."""
    print(f"\n{'suite':12}{'passed':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for outcome in outcomes:
        print(format_row(outcome))
    reasons: Counter[str] = Counter()
    for outcome in outcomes:
        reasons.update(outcome.skipped)
    for reason, count in reasons.most_common():
        print(f"SKIPPED {count}: {reason}")
    for outcome in outcomes:
        for name in outcome.failed:
            print(f"FAILED {outcome.suite.name}: {name}")
        if outcome.is_broken:
            print(f"FAILED {outcome.suite.name}: {outcome.note}")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(len(outcome.failed) + outcome.is_broken for outcome in outcomes)
    print(f"\n{passed} passed, {failed} failed, {reasons.total()} skipped")


if __name__ == "__main__":
    sys.exit(main())
