"""Every Python block, difference and command in README and docs runs. Sybil finds them.

The blocks of a page run one after another in an empty folder and share their names. A difference runs twice: first
with its `-` lines, on a copy of the names, then with its `+` lines. Commands of holdall run with a small training
script, `train.py`.

A block that cannot run here is preceded by a comment that readers do not see and that gives the reason:

    <!-- skip: next "a patch of DreamerV3's own file" -->

Code that only the test needs, such as an assertion, is a comment too: `<!-- invisible-code-block: python ... -->`.
Commands are also looked up, whether they run or not: the command, its options and its files exist.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
import unittest
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import typer
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.typing import Parser
from typer.testing import CliRunner

from holdall.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_PROCESS = {"docs/guides/jax.md", "docs/rollouts.md"}
"""Pages that fork, and those whose library must not be forked."""
OWN_TEST = {"docs/scale.md", "docs/guides/rl_zoo.md"}
"""Pages that need a Ray cluster or several trainings: tests/shards/test_page.py and tests/integration/test_zoo.py."""
NIGHTLY = {"docs/guides/offline.md", "docs/lint.md", "docs/plan.md"}
"""Pages whose blocks start several processes."""

RESULTS = ROOT / "tests" / "results" / "bench.jsonl"
TRAINING = """\
from stable_baselines3 import SAC

model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=50_000)
model.learn(110)
"""
LOOP = """\
import gymnasium
import holdall

env = gymnasium.make("CartPole-v1")
memory = holdall.ReplayMemory(env.observation_space, env.action_space, 1_000)
obs, _ = env.reset(seed=0)
for step in range(200):
    action = env.action_space.sample()
    after, reward, terminated, truncated, _ = env.step(action)
    memory.add(obs, action, reward, after, terminated, truncated)
    obs = env.reset()[0] if terminated or truncated else after
"""
WATCHING = {"docs/report.md", "docs/watch.md"}
"""Pages that watch `train.py` several times. Their `train.py` is a loop without torch, which starts in a second."""
WATCHED = "import holdall.watch; holdall.watch.start(); print(flush=True); input()"
PROCESS_ID = re.compile(r"\d{5}")
"""The id of a process in a command of a page."""
CONTEXT = typer.Context.__bases__[0]
"""The class of click whose `invoke` runs a command. Some versions of typer contain a copy of it."""
OTHER_PROGRAMS = {"export", "git", "jq", "ray"}
"""Commands that need a network, several machines or a shell."""


class _Screens(gym.Env[Any, Any]):
    """The reader's environment, `env`: small images."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return np.zeros((36, 36, 1), np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.zeros((36, 36, 1), np.uint8), 0.0, False, False, {}


# ---------------------------------------------------------------- how a block runs


def run_difference(example: Example) -> None:
    """Run the lines before the change on a copy of the names, and then the lines after it."""
    before, after = (
        "\n".join(line[1:] for line in example.parsed.splitlines() if line[:1] in {"", " ", side}) for side in "-+"
    )
    try:
        exec(compile(before, example.path, "exec"), dict(example.namespace))
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("holdall"):
            raise  # Only the package that holdall replaces may be missing.
    exec(compile("\n" * example.line + after, example.path, "exec"), example.namespace)


def run_commands(example: Example) -> None:
    """Run the commands of holdall in a block of commands."""
    for words in split_commands(example.parsed):
        if words[0] == "holdall":
            run_command(words)


def run_command(words: list[str]) -> None:
    if words[1] == "watch":
        run_watch(words)
        return
    result = CliRunner().invoke(app, words[1:])
    codes = {0, 1, 2} if words[1] == "plan" else {0}  # The run fits, is tight, does not fit.
    assert result.exit_code in codes, f"{' '.join(words)}\n{result.output}{result.stderr}"
    assert result.output
    if words[1] == "report":
        check_report(words, result.output)


def check_report(words: list[str], output: str) -> None:
    """Check the figures of a summary, or the page that a command names."""
    if "--json" not in words:
        assert "</html>" in Path(output.strip()).read_text(encoding="utf-8")
        return
    summary = json.loads(output)
    assert (
        0 < summary["last_bytes"] == sum(summary["groups"].values()) <= summary["peak_bytes"] < summary["limit_bytes"]
    )


def check_reading(words: list[str], output: str) -> None:
    """Check that the parts of every reading add up, and that a table shows the total."""
    lines = output.splitlines()
    if "--json" not in words:
        assert re.search(r"^[\d.]+ [KM]iB \(peak [\d.]+ [KM]iB\)", output, re.MULTILINE), output
        # The last reading may be of a process that has freed nearly everything.
        assert re.search(r"^part +resident", output, re.MULTILINE), output
        assert re.search(r"^(libraries|thread stacks) +[\d.]+ [KM]iB", output, re.MULTILINE), output
    if "--record" in words:
        lines = Path(words[words.index("--record") + 1]).read_text(encoding="utf-8").splitlines()
    elif "--json" not in words:
        return
    readings = [line for line in map(json.loads, lines) if line["kind"] == "reading"]
    assert readings  # The first one may be of a process that has hardly started.
    for reading in readings:
        assert reading["pss"] == sum(part["resident"] for part in reading["parts"]) > 0


def run_watch(words: list[str]) -> None:
    """Run `holdall watch` with its own training, or with a process that ends after the first reading."""
    record = Path("seen.jsonl")
    record.unlink(missing_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    if "--" not in words:
        watched = subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(watched)
        assert watched.stdout is not None
        watched.stdout.readline()
        words = [str(watched.pid) if PROCESS_ID.fullmatch(word) else word for word in [*words, "--record", str(record)]]
    watch = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    processes.append(watch)
    try:
        if "--" not in words:
            while watch.poll() is None and not (record.exists() and '"reading"' in record.read_text(encoding="utf-8")):
                time.sleep(0.05)
            watched.communicate(b"\n")
        output, _ = watch.communicate()
        assert watch.returncode == 0, output
        check_reading(words, output.decode())
    finally:
        for process in processes:
            process.kill()
            process.wait()


def split_commands(block: str) -> list[list[str]]:
    """Return the words of each command of a block, without comments. The sides of a pipe are two commands."""
    found: list[list[str]] = []
    unfinished = ""
    for line in block.splitlines(keepends=True):
        unfinished += line
        try:
            words = shlex.split(unfinished, comments=True)
        except ValueError:  # A quotation continues in the next line.
            continue
        unfinished = ""
        for is_command, part in itertools.groupby(words, lambda word: word not in {"|", "&&"}):
            found += [list(part)] if is_command else []
    return found


def parse(page: Path) -> Document:
    parsers: list[Parser] = [
        PythonCodeBlockParser(),
        CodeBlockParser("diff", run_difference),
        CodeBlockParser("sh", run_commands),
        CodeBlockParser("bash", run_commands),
        SkipParser(),
    ]
    return Sybil(parsers=parsers).parse(page)


def run_page(page: Path) -> dict[str, Any]:
    """Run the blocks of `page` in the working directory, and return their names."""
    document = parse(page)
    document.namespace.update({"__name__": "page", "env": _Screens()})
    for example in document.examples():
        try:
            example.evaluate()
        except unittest.SkipTest:
            continue
    return document.namespace


# ---------------------------------------------------------------- programs


def get_page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def has_blocks(page: Path) -> bool:
    return re.search(r"^ *```(python|diff|sh|bash)", page.read_text(encoding="utf-8"), re.MULTILINE) is not None


RUN = [
    pytest.param(page, id=get_page_name(page), marks=[pytest.mark.nightly] * (get_page_name(page) in NIGHTLY))
    for page in PAGES
    if has_blocks(page) and get_page_name(page) not in OWN_TEST
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the reader's folder, in which the blocks run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    Path("train.py").write_text(TRAINING, encoding="utf-8")
    Path("results.jsonl").write_bytes(RESULTS.read_bytes())
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3, of large buffers on a small machine
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    if get_page_name(page) in OWN_PROCESS:
        subprocess.run([sys.executable, __file__, str(page)], check=True, timeout=200)
        return
    if get_page_name(page) in WATCHING:
        Path("train.py").write_text(LOOP, encoding="utf-8")
    names = run_page(page)
    for contract in [kind for kind in names.values() if getattr(kind, "__module__", "") == "page"]:
        for rule in [name for name in dir(contract) if name.startswith("test_")]:
            getattr(contract(), rule)()  # The classes of tests in docs/extending.md.


def test_pages_with_a_rule_of_their_own_exist() -> None:
    assert {get_page_name(page) for page in PAGES} >= OWN_PROCESS | OWN_TEST | NIGHTLY | WATCHING


@pytest.mark.parametrize("page", PAGES, ids=get_page_name)
def test_every_block_that_does_not_run_has_a_reason(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<!-- skip:", text)) == len(re.findall(r'<!-- skip: next "[^"]{10,}" -->', text))


def test_a_block_that_fails_is_found(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```diff\n-assert x == 1\n+assert x == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        run_page(page)
    page.write_text("```sh\nholdall report missing.jsonl\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="missing"):
        run_page(page)


# ---------------------------------------------------------------- commands

SHELL = [
    (get_page_name(page), words)
    for page in PAGES
    for example in parse(page).examples()
    if getattr(example.region.evaluator, "__name__", "") == "run_commands"
    for words in split_commands(example.parsed)
]


def look_up(words: list[str]) -> None:
    """Check that a command exists, with its options and files."""
    word, *rest = words
    if word == "holdall":
        result = CliRunner().invoke(app, rest)
        assert result.exit_code == 0, result.output + result.stderr
    elif word == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extras in re.findall(r"holdall\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    elif word == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M) for target in rest)
    elif word == "pytest":
        assert (ROOT / rest[0]).exists(), f"there is no {rest[0]}"
    elif word == "python":
        assert rest[0] in {"-c", "-m", "train.py"} or (ROOT / rest[0]).exists(), f"there is no {rest[0]}"
    else:
        assert word in OTHER_PROGRAMS, f"no rule for {' '.join(words)}"


@pytest.mark.parametrize(("page", "words"), SHELL, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_every_command_exists_with_its_options_and_files(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of holdall are parsed to the last option, and do not run."""
    monkeypatch.setattr(CONTEXT, "invoke", lambda *_, **__: None)
    look_up(words)


@pytest.mark.parametrize(
    "wrong", ["holdall plan --capacitee 5", "holdall planet", "make coffee", "pip install holdall[x]", "rm -rf x"]
)
def test_a_wrong_command_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONTEXT, "invoke", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        look_up(wrong.split())


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", UserWarning)
    run_page(Path(sys.argv[1]))
