"""Lint against public training scripts: buffers above 1 GiB, mistakes, false findings, crashes.

lint_corpus.json lists repositories, commits and paths, each with what a reader of the script finds: the bytes of every
buffer above 1 GiB once it is full, and the rules whose mistakes it makes. `judged` are rules whose findings were read
and are true besides. The scripts are read where they are published: HOLDALL_LINT_CORPUS names a folder of bare clones,
`owner+name/repo`. Scripts with `held_out` were not looked at while the rules were written.

    HOLDALL_LINT_CORPUS=/clones python -m pytest tests/integration/test_lint_corpus.py -s
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdall.tools.lint.engine import FileChecker
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

SCRIPTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("lint_corpus.json").read_text(encoding="utf-8"))
SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
MOST_BYTES = 2**20
TOLERANCE = 0.05

pytestmark = pytest.mark.nightly


@dataclass
class Score:
    """What was found, over all scripts of one kind."""

    buffers: list[tuple[str, int, bool]] = field(default_factory=list)
    mistakes: list[tuple[str, str, bool]] = field(default_factory=list)
    findings: list[tuple[Finding, bool]] = field(default_factory=list)

    def recall_of_buffers(self) -> float:
        return sum(found for *_, found in self.buffers) / max(len(self.buffers), 1)

    def recall_of_mistakes(self) -> float:
        return sum(found for *_, found in self.mistakes) / max(len(self.mistakes), 1)

    def false_findings(self) -> float:
        return sum(not is_true for _, is_true in self.findings) / max(len(self.findings), 1)

    def told(self) -> str:
        missed = [f"  missed {name}: {what}" for name, what, found in (*self.buffers, *self.mistakes) if not found]
        wrong = [
            f"  false {one.place.path}:{one.place.line} {one.rule}" for one, is_true in self.findings if not is_true
        ]
        counts = f"{len(self.buffers)} buffers {self.recall_of_buffers():.0%}, {len(self.mistakes)} mistakes"
        rates = f"{self.recall_of_mistakes():.0%}, {len(self.findings)} findings, {self.false_findings():.1%} false"
        return "\n".join([f"{counts} {rates}", *missed, *wrong])


def clone_of(folder: Path, repository: str) -> Path:
    clone = folder / repository.replace("/", "+") / "repo"
    return clone / ".git" if (clone / ".git").is_dir() else clone


def checked_out(clone: Path, commit: str, into: Path) -> Path:
    """Write the text files of a commit; large files of a clone may be absent, so each is asked for by itself."""
    git = ["git", f"--git-dir={clone}"]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", commit], capture_output=True, check=True).stdout
    lines = [line for line in listed.decode(errors="replace").split("\0") if line.endswith(SUFFIXES)]
    wanted = [(line.split("\t", 1)[1], line.split()[2]) for line in lines if line.split()[1] == "blob"]
    question = "".join(f"{blob}\n" for _, blob in wanted).encode()
    answer = subprocess.run([*git, "cat-file", "--batch"], input=question, capture_output=True, check=True).stdout
    at = 0
    for name, _ in wanted:
        end = answer.index(b"\n", at)
        head = answer[at:end].split()
        if len(head) < 3:  # missing
            at = end + 1
            continue
        size = int(head[2])
        if size <= MOST_BYTES:
            file = into / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(answer[end + 1 : end + 1 + size])
        at = end + 2 + size
    (into / ".git").mkdir(exist_ok=True)  # the root of a repository
    return into


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Score]:
    folder = os.environ.get("HOLDALL_LINT_CORPUS")
    if not folder:
        pytest.skip("HOLDALL_LINT_CORPUS names no folder of clones of public repositories")
    root = tmp_path_factory.mktemp("corpus")
    checker = FileChecker(RULES, REFERENCE_MACHINE)
    scores = {False: Score(), True: Score()}
    checkouts: dict[str, Path] = {}
    for script in SCRIPTS:
        name = script["repository"]
        if name not in checkouts:
            clone = clone_of(Path(folder), name)
            assert clone.is_dir(), f"{clone} is missing"
            checkouts[name] = checked_out(clone, script["commit"], root / name.replace("/", "+"))
        judge(scores[script["held_out"]], script, checker.check(checkouts[name] / script["path"]))
    for held_out, score in scores.items():
        print("held out:" if held_out else "looked at:", score.told())  # noqa: T201  shown with -s
    return scores


def judge(score: Score, script: dict[str, Any], findings: list[Finding]) -> None:
    name = f"{script['repository']}/{script['path']}"
    large = [int(one.numbers["needed_bytes"]) for one in findings if one.rule == "M19"]
    for expected in script["buffers"]:
        close = next((size for size in large if abs(size - expected) <= TOLERANCE * expected), None)
        if close is not None:
            large.remove(close)
        score.buffers.append((name, expected, close is not None))
    rules = {one.rule for one in findings}
    score.mistakes += [(name, rule, rule in rules) for rule in script["mistakes"]]
    known = {*script["mistakes"], *script.get("judged", ()), *(("M19",) if script["buffers"] else ())}
    score.findings += [(one, one.rule in known) for one in findings]


def crashes(score: Score) -> Iterator[Finding]:
    return (one for one, _ in score.findings if "lint failed" in one.message)


@pytest.mark.parametrize("held_out", [False, True])
def test_what_lint_says_of_public_scripts_is_what_a_reader_finds(scores: dict[bool, Score], held_out: bool) -> None:
    score = scores[held_out]
    assert list(crashes(score)) == []
    assert score.recall_of_buffers() >= 0.8
    assert score.recall_of_mistakes() >= 0.7
    assert score.false_findings() <= 0.03


def test_the_list_has_sixty_scripts_and_a_third_of_them_were_held_out() -> None:
    assert len(SCRIPTS) >= 60
    assert sum(script["held_out"] for script in SCRIPTS) * 3 >= len(SCRIPTS) - 2
    assert len({script["repository"] for script in SCRIPTS}) >= 40
