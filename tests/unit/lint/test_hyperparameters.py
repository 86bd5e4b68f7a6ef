"""Files of hyperparameters are read as rl-baselines3-zoo reads them, without executing their strings."""

from pathlib import Path

import pytest

from holdall.errors import MissingPackageError
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.run import UNKNOWN, ConfiguredRun, Reference, buffer_need
from holdall.tools.lint.source.hyperparameters import YamlError, read_runs


def run(text: str, path: str = "sac.yml") -> ConfiguredRun:
    (only,) = read_runs(text, path)
    return only


def test_an_entry_is_a_run_of_the_algorithm_that_the_file_is_named_after() -> None:
    entry = run("Pendulum-v1:\n  n_timesteps: !!float 2e4\n  policy: MlpPolicy\n  buffer_size: 50000")
    assert (entry.title, entry.algorithm.name) == ("Pendulum-v1", "SAC")
    assert entry.total_timesteps == 20_000
    assert entry.whole("buffer_size") == 50_000
    assert entry.whole("batch_size") == 256
    assert entry.environments.number == 1
    assert entry.setting("buffer_size").place.line == 4
    assert entry.setting("buffer_size").place.column == 16


def test_merge_keys_are_followed_and_overridden() -> None:
    first, second = read_runs(
        "A-v0: &base\n  policy: MlpPolicy\n  n_timesteps: 1000\n  batch_size: 64\nB-v0:\n  <<: *base\n  batch_size: 32",
        "ppo.yml",
    )
    assert (first.whole("batch_size"), second.whole("batch_size")) == (64, 32)
    assert second.total_timesteps == 1000
    assert second.value("policy") == "MlpPolicy"


def test_a_flat_file_names_its_algorithm() -> None:
    entry = run("algo: ppo\nn_envs: 8\nn_steps: 128\npolicy: CnnPolicy", "mine.yaml")
    assert (entry.title, entry.algorithm.name) == ("mine", "PPO")
    assert entry.environments.number == 8


def test_a_file_of_holdall_plan_says_what_is_observed_too() -> None:
    entry = run(
        "algo: sac\nobs: {image: '84x84x3:uint8', vector: 31}\naction: 8\ncapacity: 400000\nnum_envs: 4\n"
        "vec_env: subproc\ntotal_timesteps: 1000000\nhandle_timeout_termination: false",
        "dog.yaml",
    )
    assert entry.whole("buffer_size") == 400_000
    assert entry.environments.number == 4
    assert entry.environments.vector == "subproc"
    assert entry.environments.observation is not None
    assert entry.environments.action is not None
    assert entry.environments.observation.nbytes == 84 * 84 * 3 + 31 * 4
    assert entry.environments.action.nbytes == 32
    assert entry.total_timesteps == 1_000_000
    assert entry.value("replay_buffer_kwargs") == {"handle_timeout_termination": False}
    needed = buffer_need(entry, REFERENCE_MACHINE)
    assert needed is not None
    # Without timeouts to handle their array is allocated, and never touched.
    assert needed.layout.nbytes == 400_000 * 42_628
    assert needed.resident_bytes == 400_000 * 42_624


@pytest.mark.parametrize("obs", ["nonsense", "[1, 2]", "84y84"])
def test_a_space_that_cannot_be_read_is_unknown(obs: str) -> None:
    assert run(f"algo: ppo\nobs: '{obs}'\naction: 8").environments.observation is None


def test_atari_frames_and_their_stack_are_known() -> None:
    entry = run(
        "atari:\n  env_wrapper:\n    - stable_baselines3.common.atari_wrappers.AtariWrapper\n"
        "  frame_stack: 4\n  policy: CnnPolicy\n  n_envs: 8",
        "dqn.yml",
    )
    assert entry.environments.observation is not None
    assert entry.environments.observation.leaves[0].shape == (84, 84, 4)
    assert entry.environments.observation.nbytes == 28_224


@pytest.mark.parametrize("more", ["    - other.Wrapper", "  normalize: true"])
def test_what_another_wrapper_makes_of_them_is_not(more: str) -> None:
    text = "atari:\n  policy: CnnPolicy\n  env_wrapper:\n    - stable_baselines3.common.atari_wrappers.AtariWrapper\n"
    assert run(text + more, "dqn.yml").environments.observation is None


def test_strings_of_python_are_read_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    entry = run(
        "A-v0:\n  policy: MlpPolicy\n"
        '  replay_buffer_kwargs: "dict(handle_timeout_termination=False)"\n'
        f"  policy_kwargs: \"open('{mark}', 'w')\"\n"
        "  replay_buffer_class: HerReplayBuffer"
    )
    assert entry.value("replay_buffer_kwargs") == {"handle_timeout_termination": False}
    assert entry.value("policy_kwargs") is UNKNOWN
    assert isinstance(entry.value("replay_buffer_class"), Reference)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("services:\n  web:\n    image: nginx", "docker-compose.yml"),
        ("- a\n- b", "ppo.yml"),
        ("", "ppo.yml"),
        ("just text", "ppo.yml"),
        ("A-v0:\n  policy: MlpPolicy", "unheard-of.yml"),
        ("policy: 3", "ppo-notes.yml"),
    ],
)
def test_other_yaml_holds_no_runs(text: str, path: str) -> None:
    assert read_runs(text, path) == ()


@pytest.mark.parametrize(
    "text", ["a: [1", "a: &x {b: *x}\n", "a: !!python/object/apply:os.system ['true']", "a: b: c", "\x00"]
)
def test_what_is_no_plain_yaml_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_runs("p:\n  policy: M\n" + text, "ppo.yml")
    assert caught.value.place.line >= 1


def test_without_pyyaml_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingPackageError, match=r"holdall\[yaml\]"):
        read_runs("a: 1", "ppo.yml")
