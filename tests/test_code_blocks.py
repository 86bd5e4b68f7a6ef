"""Every block of code in README and docs is in a list, which names the test that runs it.

A new block that is in no list fails here. Programs run as they stand, block after block of a page; so do the
commands of plan, lint and watch, where the number of a process stands for one that the test has started. Commands that
take hours, need other machines or install something are looked up: the command, its options and its files exist.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import holdall
from holdall.cli import app

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)(```+|~~~+)[ ]*(\w*)[^\n]*\n(.*?)^\1\2[ ]*$", re.DOTALL | re.MULTILINE)

NO_CODE = "shows what a program prints, or is a drawing"
LOOKED_UP = "test_code_blocks.py::test_every_command_exists_with_its_options_and_files"
SIDES = "test_code_blocks.py::test_both_sides_of_a_difference_run"
GUIDES = "test_guides.py::test_the_programs_of_a_guide_run"
ZOO = "integration/test_zoo.py"
BLOCKS: dict[str, dict[str, tuple[int, str]]] = {
    "README.md": {
        "sh": (2, LOOKED_UP),
        "diff": (1, SIDES),
        "python": (2, "test_readme.py::test_python_blocks_of_the_readme_run"),
    },
    "docs/architecture.md": {"": (1, NO_CODE)},
    "docs/bench.md": {"sh": (2, LOOKED_UP)},
    "docs/checkpoints.md": {
        "python": (3, "test_code_blocks.py::test_the_programs_and_commands_of_checkpoints_md_run"),
        "sh": (1, "test_code_blocks.py::test_the_programs_and_commands_of_checkpoints_md_run"),
    },
    "docs/extending.md": {
        "python": (8, "test_docs.py::test_the_examples_in_extending_md_keep_the_contracts"),
        "sh": (1, LOOKED_UP),
    },
    "docs/format.md": {"": (1, NO_CODE)},
    "docs/gpu.md": {"python": (1, "test_code_blocks.py::test_the_program_of_gpu_md_runs_without_a_gpu_too")},
    "docs/guides/autoreset.md": {"python": (3, GUIDES)},
    "docs/guides/cleanrl.md": {
        "diff": (1, "unit/test_cleanrl.py::test_the_programs_of_the_guide_run"),
        "python": (2, "unit/test_cleanrl.py::test_the_programs_of_the_guide_run"),
    },
    "docs/guides/drqv2.md": {
        "diff": (1, "unit/test_drqv2.py::test_the_changed_line_of_the_guide_gives_both_names"),
        "python": (1, GUIDES),
    },
    "docs/guides/jax.md": {
        "diff": (1, "test_guides.py::test_the_programs_for_jax_run_in_a_process_of_their_own"),
        "python": (2, "test_guides.py::test_the_programs_for_jax_run_in_a_process_of_their_own"),
    },
    "docs/guides/lerobot.md": {
        "text": (2, "unit/test_lerobot.py::test_the_lines_of_the_guide_start_the_learner_with_holdalls_buffers"),
        "python": (1, GUIDES),
    },
    "docs/guides/maniskill.md": {"python": (2, GUIDES)},
    "docs/guides/multi_agent.md": {"diff": (1, GUIDES), "python": (2, GUIDES)},
    "docs/guides/offline.md": {"sh": (1, LOOKED_UP), "python": (8, GUIDES)},
    "docs/guides/plain_loop.md": {"diff": (1, GUIDES), "python": (4, GUIDES)},
    "docs/guides/recurrent.md": {
        "python": (5, "test_docs.py::test_the_program_in_recurrent_md_rewrites_states_and_values"),
        "sh": (1, LOOKED_UP),
    },
    "docs/guides/rl_zoo.md": {
        "diff": (
            1,
            f"{ZOO}::test_one_word_on_the_command_line_gives_the_buffers_and_the_same_weights",
        ),
        "sh": (5, f"{ZOO}::test_the_commands_of_the_guide_run_as_they_stand"),
        "python": (1, f"{ZOO}::test_the_commands_of_the_guide_run_as_they_stand"),
        "yaml": (1, f"{ZOO}::test_the_class_may_be_named_in_hyperparameters"),
    },
    "docs/guides/sb3.md": {
        "diff": (1, SIDES),
        "text": (1, NO_CODE),
        "python": (5, "integration/sb3/test_guide.py::test_the_programs_of_the_guide_run"),
    },
    "docs/guides/tianshou.md": {"diff": (1, GUIDES), "python": (2, GUIDES)},
    "docs/guides/torchrl.md": {
        "diff": (1, "unit/test_torchrl.py::test_the_programs_of_the_guide_run"),
        "python": (2, "unit/test_torchrl.py::test_the_programs_of_the_guide_run"),
    },
    "docs/guides/from_reverb.md": {"python": (3, GUIDES)},
    "docs/guides/world_models.md": {
        "diff": (3, "test_storage_lines.py::test_both_sides_of_td_mpc2_draw_the_same_batches"),
        "python": (1, "unit/test_dreamer.py::test_the_program_of_the_guide_runs"),
    },
    "docs/index.md": {"sh": (1, LOOKED_UP), "python": (2, "test_site.py::test_the_programs_of_a_page_run")},
    "docs/install.md": {
        "sh": (2, LOOKED_UP),
        "text": (1, NO_CODE),
    },
    "docs/lint.md": {
        "sh": (1, "test_code_blocks.py::test_the_commands_of_lint_md_run"),
        "python": (1, "test_code_blocks.py::test_the_program_of_lint_md_runs"),
        "text": (1, NO_CODE),
    },
    "docs/memory.md": {"python": (1, "test_site.py::test_the_programs_of_a_page_run")},
    "docs/notebooks.md": {"sh": (1, LOOKED_UP)},
    "docs/plan.md": {"sh": (1, "test_code_blocks.py::test_the_commands_of_plan_md_give_a_verdict")},
    "docs/report.md": {"sh": (1, "test_code_blocks.py::test_the_commands_of_report_md_run")},
    "docs/rollouts.md": {
        "python": (5, "test_docs.py::test_the_programs_in_rollouts_md_collect_and_read_rollouts"),
        "diff": (1, SIDES),
    },
    "docs/samplers.md": {
        "python": (4, "test_docs.py::test_dqn_with_priorities_in_samplers_md_learns_and_tells_its_errors")
    },
    "docs/scale.md": {"": (1, NO_CODE), "python": (3, "shards/test_page.py::test_programs"), "bash": (1, LOOKED_UP)},
    "docs/watch.md": {
        "": (2, NO_CODE),
        "python": (2, "unit/watch/test_watch_page.py::test_programs"),
        "sh": (1, LOOKED_UP),
    },
}
"""By page and kind of block: how many there are, and which test runs them."""

HOLDALL = [sys.executable, "-m", "holdall"]
PROCESS = "47068"
"""The process in docs/watch.md."""
TRAINING = """\
from stable_baselines3 import SAC

model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=50_000)
model.learn(1_000)
"""
HYPERPARAMETERS = "CartPole-v1:\n  n_timesteps: !!float 1e5\n  policy: MlpPolicy\n  buffer_size: 100000\n"

CONTEXT = typer.Context.__bases__[0]
"""What calls a command: click's class, which some versions of typer bring themselves."""
ELSEWHERE = {"ray", "export", "jq", "git"}
"""Commands of other programs. They need a network, several machines or a shell."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    return [Block(name, text.count("\n", 0, found.start(4)), found[3], found[4]) for found in FENCE.finditer(text)]


def of(page: str, kind: str) -> list[Block]:
    return [block for block in blocks(ROOT / page) if block.kind == kind]


def run_programs(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the Python blocks of a page in one namespace; a traceback shows the line of the page."""
    for block in of(page, "python"):
        exec(compile("\n" * block.line + block.text, page, "exec"), names)
    return names


# ---------------------------------------------------------------- the list


def test_every_block_is_in_the_list() -> None:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for block in (block for page in PAGES for block in blocks(page)):
        found[block.page][block.kind] += 1
    listed = {page: {kind: count for kind, (count, _) in kinds.items()} for page, kinds in BLOCKS.items()}
    assert {page: dict(kinds) for page, kinds in found.items()} == listed


def test_every_python_block_is_run() -> None:
    runners = {page: kinds["python"][1] for page, kinds in BLOCKS.items() if "python" in kinds}
    assert not [page for page, runner in runners.items() if runner in {NO_CODE, LOOKED_UP}]


def test_every_test_in_the_list_exists_and_names_its_page() -> None:
    for page, kinds in BLOCKS.items():
        for _, runner in kinds.values():
            if runner in {NO_CODE, LOOKED_UP, SIDES}:
                continue
            file, _, name = runner.partition("::")
            text = (TESTS / file).read_text(encoding="utf-8")
            assert f"def {name}(" in text, runner
            assert Path(page).stem in text, f"{file} does not name {page}"


# ---------------------------------------------------------------- programs


class _Screens(gym.Env[Any, Any]):
    """The environment that the reader has: small images."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return np.zeros((36, 36, 1), np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.zeros((36, 36, 1), np.uint8), 0.0, False, False, {}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3, of a million images on a small machine
@pytest.mark.parametrize("side", "+-")
@pytest.mark.parametrize("page", [page for page, kinds in BLOCKS.items() if kinds.get("diff", (0, ""))[1] == SIDES])
def test_both_sides_of_a_difference_run(page: str, side: str) -> None:
    (block,) = of(page, "diff")
    names: dict[str, Any] = {"env": _Screens()}
    exec("\n".join(line[1:] for line in block.text.splitlines() if line[:1] in {" ", side}), names)
    buffer = getattr(names["model"], "replay_buffer", None) or names["model"].rollout_buffer
    assert type(buffer).__module__.startswith("holdall.") == (side == "+")


def test_the_program_of_gpu_md_runs_without_a_gpu_too() -> None:
    names = run_programs("docs/gpu.md", {})
    assert len(names["memory"]) == 3 * names["LANES"]
    assert names["batch"].obs.device.type == names["device"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_programs_and_commands_of_checkpoints_md_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    env = gym.make("CartPole-v1")
    memory = holdall.ReplayMemory(env.observation_space, env.action_space, capacity=1000, seed=0)
    holdall.Recorder(env, memory).collect(lambda _obs: env.action_space.sample(), steps=100)
    names = run_programs("docs/checkpoints.md", {"__name__": "page", "memory": memory, "holdall": holdall, "gym": gym})
    assert names["memory"].attached["generation.json"] == b'{"n": 25}'
    assert Path("again.pth").read_bytes() == b"weights"
    assert names["model"].num_timesteps == 120
    plain = names["SAC"]("MlpPolicy", "Pendulum-v1", buffer_size=100)
    plain.learn(20)
    plain.save_replay_buffer("buffer.pkl")
    for block in of("docs/checkpoints.md", "sh"):
        for command in commands(block):
            done = CliRunner().invoke(app, command[1:])
            if done.exit_code == 1 and "holdall[minari]" in done.stderr:
                continue  # an extra that is not installed here
            assert done.exit_code == 0, done.output + done.stderr


def test_the_commands_of_report_md_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand; a training that sleeps and the results of a bench lie in the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")
    Path("train.py").write_text("import time\ntime.sleep(1)\n", encoding="utf-8")
    Path("results.jsonl").write_bytes((TESTS / "results" / "bench.jsonl").read_bytes())
    (block,) = of("docs/report.md", "sh")
    first, *others = commands(block)
    # A watch ends with its own process.
    subprocess.run([sys.executable, "-m", *first], check=True, capture_output=True, timeout=100)
    for command in others:
        done = CliRunner().invoke(app, command[1:])
        assert done.exit_code == 0, done.output + done.stderr
    assert Path("run.html").exists()
    assert Path("page.html").exists()


# ---------------------------------------------------------------- commands


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a block as words, without comments; a pipe makes two."""
    found: list[list[str]] = []
    begun = ""
    for line in block.text.splitlines(keepends=True):
        begun += line
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # a quote goes on in the next line
            continue
        begun = ""
        for is_command, part in itertools.groupby(words, lambda word: word not in {"|", "&&"}):
            found += [list(part)] if is_command else []
    return found


def _is_looked_up(block: Block) -> bool:
    return BLOCKS.get(block.page, {}).get(block.kind, (0, ""))[1] == LOOKED_UP


SHELL = [block for page in PAGES for block in blocks(page) if _is_looked_up(block)]


def _looked_up(command: list[str]) -> None:
    word, *rest = command
    if word == "holdall":
        done = CliRunner().invoke(app, rest)
        assert done.exit_code == 0, done.output + done.stderr
    elif word == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extras in re.findall(r"holdall\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    elif word == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M) for target in rest)
    elif word == "pytest":
        assert (ROOT / rest[0]).exists(), f"there is no {rest[0]}"
    elif word == "python" and rest[0] == "-c":
        ast.parse(rest[1])
    elif word == "python":
        assert rest[0] == "train.py" or (ROOT / rest[0]).exists(), f"there is no {rest[0]}"
    else:
        assert word in ELSEWHERE, f"no rule for {' '.join(command)}"


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.page}:{block.line}")
def test_every_command_exists_with_its_options_and_files(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """holdall's own are parsed to the last option, and not run."""
    monkeypatch.setattr(CONTEXT, "invoke", lambda *_, **__: None)
    assert commands(block)
    for command in commands(block):
        _looked_up(command)


def test_a_wrong_option_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONTEXT, "invoke", lambda *_, **__: None)
    for wrong in ("holdall plan --capacitee 5", "holdall planet", "make coffee", "pip install holdall[x]", "rm -rf x"):
        with pytest.raises(AssertionError):
            _looked_up(wrong.split())


# ---------------------------------------------------------------- commands that run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the reader's folder, with a training script and the settings of another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    (tmp_path / "hyperparams").mkdir()
    (tmp_path / "hyperparams" / "dqn.yml").write_text(HYPERPARAMETERS, encoding="utf-8")
    return tmp_path


def _of_holdall(page: str) -> list[list[str]]:
    return [words for block in of(page, "sh") for words in commands(block) if words[0] == "holdall"]


PLANNED = {
    "holdall plan -- python train.py": "SAC, 50,000 transitions, 1 environment, batches of 256",
    "holdall plan --set": "SAC, 200,000 transitions, 1 environment, batches of 256",
    "holdall plan --algo": "42.63  39.70",
}
"""What the commands of docs/plan.md print: the run as it was planned, and GB and GiB of its buffer."""


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", _of_holdall("docs/plan.md"), ids=" ".join)
def test_the_commands_of_plan_md_give_a_verdict(words: list[str]) -> None:
    (printed,) = [text for start, text in PLANNED.items() if " ".join(words).startswith(start)]
    done = CliRunner().invoke(app, [sys.executable if word == "python" else word for word in words[1:]])
    assert done.exit_code in {0, 1, 2}, done.output + done.stderr  # fits, is tight, does not fit
    assert "replay buffer (SB3)" in done.output
    assert printed in done.output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", _of_holdall("docs/lint.md"), ids=" ".join)
def test_the_commands_of_lint_md_run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output + done.stderr
    if "--explain" in words:
        assert done.stdout.startswith("# M05 flatten-doubles-rollout (warning)")
    elif "--" in words:
        size = "the replay buffer of 50,000 transitions: 2.00 MB (1.91 MiB)"
        assert done.stdout.splitlines()[1:] == [
            f"SAC, 1 environment, 1,000 steps, {size}",
            "0 errors, 0 warnings, 1 info (--infos lists them)",
        ]
    else:
        assert done.stdout == "0 errors, 0 warnings, 0 infos\n"


def test_the_program_of_lint_md_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=2_000_000)
    model.learn = lambda *arguments, **keywords: model  # type: ignore[method-assign]  # a million steps take too long
    run_programs("docs/lint.md", {"model": model})
    assert capsys.readouterr().out.startswith("M09 info buffer_size=2,000,000 never fills in 1,000,000 steps")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Return a process with an agent, that waits for its input to close."""
    program = "import holdall.watch; holdall.watch.start(); print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


FIRST_OUTPUT_BYTES = 40
"""Bytes that a command shows once it has looked at a process."""


class _Terminal:
    """A command in a terminal of its own."""

    def __init__(self, words: list[str]) -> None:
        self._ours, its = os.openpty()
        self.process = subprocess.Popen([*HOLDALL, *words], stdin=its, stdout=its, stderr=its)
        os.close(its)
        self.shown = b""
        with contextlib.suppress(OSError):  # The command ended.
            while len(self.shown) < FIRST_OUTPUT_BYTES:  # The bytes that hide the cursor come before the first reading.
                self.shown += os.read(self._ours, 1)

    def end(self) -> int:
        """Read what else it shows, and return its exit code."""
        with contextlib.suppress(OSError):  # what Linux says at the end
            while more := os.read(self._ours, 1 << 16):
                self.shown += more
        os.close(self._ours)
        return self.process.wait()


@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")
def test_the_commands_of_watch_md_about_a_process_end_with_it(process: subprocess.Popen[str]) -> None:
    with contextlib.ExitStack() as stack:
        started = {}
        for words in (words for words in _of_holdall("docs/watch.md") if PROCESS in words):
            terminal = _Terminal([str(process.pid) if word == PROCESS else word for word in words[1:]])
            started[" ".join(words)] = terminal
            stack.callback(terminal.process.kill)
        process.communicate("\n")
        codes = {command: terminal.end() for command, terminal in started.items()}
    assert set(codes.values()) == {0}, {command: terminal.shown for command, terminal in started.items()}
    header, reading, *_ = started[f"holdall watch --json {PROCESS}"].shown.splitlines()
    assert json.loads(header)["pid"] == process.pid
    parts = json.loads(reading)["parts"]
    assert sum(part["resident"] for part in parts) == json.loads(reading)["pss"] > 0
    once = started[f"holdall watch --once {PROCESS}"].shown.decode()
    assert re.search(r"\d+\.\d MiB \(peak \d+\.\d MiB\)", once)


@pytest.mark.parametrize("place", range(2))
def test_the_commands_of_watch_md_that_start_a_training_keep_its_exit_code(place: int, folder: Path) -> None:
    (folder / "train.py").write_text(
        "import sys, time\nprint('done', flush=True)\ntime.sleep(1.5)\nsys.exit(7)\n", encoding="utf-8"
    )
    starting = [words for words in _of_holdall("docs/watch.md") if "--" in words]
    assert len(starting) == 2
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*HOLDALL, *starting[place][1:]], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "done"
    assert re.search(r"^\d+\.\d [KM]iB \(peak \d+\.\d MiB\)", done.stdout, re.MULTILINE)
    if "--record" in starting[place]:
        record = [json.loads(line) for line in (folder / "run.jsonl").read_text(encoding="utf-8").splitlines()]
        reading = record[1]
        assert sum(part["resident"] for part in reading["parts"]) == reading["pss"] > 0


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("folder")
def test_the_quick_look_at_buffers_of_bench_md_shows_figures_of_both() -> None:
    (words,) = [words for words in _of_holdall("docs/bench.md") if "--rounds" in words]
    done = subprocess.run(
        [*HOLDALL, *words[1:]], capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "80"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "2,000 transitions" in done.stdout
    for library in ("sb3", "holdall"):
        assert re.search(rf"^ {library} .*\d [KM]iB +\d+ µs +\d+\.\d ms", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("all 2,000") >= 2


@pytest.mark.nightly
def test_the_example_of_recurrent_md_learns(tmp_path: Path) -> None:
    (block,) = of("docs/guides/recurrent.md", "sh")
    ((_, script),) = commands(block)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
