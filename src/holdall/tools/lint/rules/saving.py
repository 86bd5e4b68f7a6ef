"""Rules about checkpoints: their size, parts of a run that are not saved, and buffers that are pickled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.arguments import PICKLE_PROTOCOL
from holdall.tools.lint.finding import Edit, Place, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.run import locate_model
from holdall.tools.lint.source import Source, get_argument, has_unpacked_arguments
from holdall.tools.lint.source_sb3 import find_model
from holdall.tools.plan.algorithms import ALGORITHM_CLASSES
from holdall.tools.probe.snapshot import FoundCallback, Snapshot
from holdall.units import format_bytes

_PROTOCOL = 5
"""First pickle protocol that writes arrays without a copy."""
_PYTHON_WITH_DEFAULT_5 = (3, 14)
"""First Python version whose default protocol is 5."""
_LARGE = re.compile(r"buffer|memory|replay|transition|trajector|experience|rollout|episode|dataset", re.IGNORECASE)
"""Names of objects that contain arrays by the gigabyte. A pickled dict of settings does not matter."""
_FACTORY = re.compile(r"\b(?:make|create|build)_")
"""Names of functions such as `make_buffer`. A pickled function does not contain the buffer that it makes."""


def _find_buffer_savers(run: Snapshot) -> list[FoundCallback]:
    """Return the callbacks that save the replay buffer."""
    savers = [callback for callback in run.passed_callbacks if callback.kind == "CheckpointCallback"]
    return [callback for callback in savers if callback.settings.get("save_replay_buffer") is True]


class CheckpointsBeyondDisk(Rule):
    """Adds up the replay buffers that a CheckpointCallback writes during the run.

    Why: Every checkpoint writes the whole buffer, full or not, into a new file, and no file is ever deleted.
    Fix: Save less often, delete old files, or use `holdall.sb3.CheckpointCallback`, which writes only the transitions
    since the last checkpoint.

    Bad (disk_bytes=10MB):
        from stable_baselines3 import SAC
        from stable_baselines3.common.callbacks import CheckpointCallback
        checkpoint = CheckpointCallback(1_000, "models", save_replay_buffer=True)
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000).learn(100_000, callback=checkpoint)

    Good (disk_bytes=10MB):
        from stable_baselines3 import SAC
        from stable_baselines3.common.callbacks import CheckpointCallback
        checkpoint = CheckpointCallback(50_000, "models", save_replay_buffer=True)
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000).learn(100_000, callback=checkpoint)
    """

    code = "S01"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the sum with the free space of the disk."""
        for model in run.learning_models:
            buffer = run.find_buffer(model)
            steps = model.run_steps
            if buffer is None or buffer.kind != "replay" or steps is None or machine.disk_bytes is None:
                continue
            for callback in _find_buffer_savers(run):
                every = callback.count("save_freq")
                saves = steps // model.n_envs // every if every else 0
                written = saves * buffer.nbytes
                if written > machine.disk_bytes:
                    text = (
                        f"{saves} checkpoints of {format_bytes(buffer.nbytes)} are {format_bytes(written)}, but the "
                        f"disk has {format_bytes(machine.disk_bytes)} free"
                    )
                    numbers = {
                        "checkpoints": saves,
                        "checkpoint_bytes": buffer.nbytes,
                        "disk_bytes": machine.disk_bytes,
                    }
                    yield Match(text, locate_model(model), numbers)


class NoReplayBufferToSave(Rule):
    """Finds `save_replay_buffer=True` for a model that has no replay buffer.

    Why: On-policy models use a rollout once and drop it. The option neither takes memory nor saves anything.
    Fix: Delete the option.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        callback = CheckpointCallback(10_000, "models", save_replay_buffer=True)
        PPO("MlpPolicy", "Pendulum-v1").learn(100_000, callback=callback)

    Good:
        from stable_baselines3 import SAC
        from stable_baselines3.common.callbacks import CheckpointCallback
        callback = CheckpointCallback(10_000, "models", save_replay_buffer=True)
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=100_000).learn(100_000, callback=callback)
    """

    code = "S02"
    severity = Severity.INFO

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look for the option in callbacks of on-policy models."""
        for model in run.learning_models:
            if model.is_on_policy and _find_buffer_savers(run):
                text = f"{model.algorithm} has no replay buffer, so save_replay_buffer=True does nothing"
                yield Match(text, locate_model(model))


class PickleCopiesArrays(Rule):
    """Finds buffers that are pickled with a protocol before 5.

    Why: Up to protocol 4, the default before Python 3.14, every array is copied into a bytes object before it is
    written: an array of 100 GB needs 100 GB more. Protocol 5 writes arrays without a copy.
    Fix: `pickle.dump(buffer, file, protocol=5)`. It also streams into a gzip file.

    Bad:
        import pickle
        with open("buffer.pkl", "wb") as file:
            pickle.dump(replay_buffer, file)

    Good:
        import pickle
        with open("buffer.pkl", "wb") as file:
            pickle.dump(replay_buffer, file, protocol=5)
    """

    code = "S03"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look at the protocol of each `dump` of a buffer."""
        for call in _find_pickling_calls(source, "dump"):
            given = PICKLE_PROTOCOL.find(call)
            if has_unpacked_arguments(call) or (given is None and machine.python >= _PYTHON_WITH_DEFAULT_5):
                continue
            protocol = 4 if given is None else source.evaluate_whole_number(given)
            if protocol is None or not 0 <= protocol < _PROTOCOL:
                continue
            used = "the default protocol (4)" if given is None else f"protocol {protocol}"
            text = f"{ast.unparse(call.args[0])} is pickled with {used}: each array is copied before it is written"
            yield Match(text, source.get_place(call), {"protocol": protocol}, _set_protocol(source, call, given))


def _set_protocol(source: Source, call: ast.Call, given: ast.expr | None) -> Edit | None:
    """Return the edit that makes the protocol 5, or None if the protocol is not a literal."""
    if isinstance(given, ast.Constant):
        return Edit(source.get_place(given), ast.unparse(given), str(_PROTOCOL))
    if given is not None:
        return None
    last = source.get_place([*call.args, *(keyword.value for keyword in call.keywords)][-1])
    end = Place(source.path, last.end_line, last.end_column, last.end_line, last.end_column)
    return Edit(end, "", f", protocol={_PROTOCOL}")


def _find_pickling_calls(source: Source, function: str) -> Iterator[ast.Call]:
    """Yield the calls of `pickle.dump` or `pickle.dumps` that pickle a buffer, judged by its name."""
    for call in source.find_calls(f"pickle.{function}", f"cloudpickle.{function}"):
        name = ast.unparse(call.args[0]) if call.args else ""
        if _LARGE.search(name) and not _FACTORY.search(name):
            yield call


class PickledIntoMemory(Rule):
    """Finds buffers that are pickled into one bytes object.

    Why: `pickle.dumps` makes a second copy of the whole buffer, and compressing the result makes a third.
    Fix: Stream it: `with gzip.open(path, 'wb') as file: pickle.dump(buffer, file, protocol=5)`.

    Bad:
        import gzip
        import pickle
        data = gzip.compress(pickle.dumps(replay_buffer))

    Good:
        import gzip
        import pickle
        with gzip.open("buffer.pkl.gz", "wb") as file:
            pickle.dump(replay_buffer, file, protocol=5)
    """

    code = "S05"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `dumps` of buffers."""
        for call in _find_pickling_calls(source, "dumps"):
            text = f"pickle.dumps makes a second copy of {ast.unparse(call.args[0])} in memory"
            yield Match(text, source.get_place(call))


class ResumesWithEmptyBuffer(Rule):
    """Finds an off-policy model that is loaded and trained further without its replay buffer.

    Why: `model.save` does not save the replay buffer. A resumed run learns from its first few new transitions alone, at
    the full rate, and can unlearn its policy before the buffer has filled again.
    Fix: `model.save_replay_buffer` and `model.load_replay_buffer`, or `holdall.sb3.CheckpointCallback`, which saves
    both together in little memory. If the buffer is too large, start updates only after `learning_starts` new steps.

    Bad:
        from stable_baselines3 import SAC
        model = SAC.load("agent", env="Pendulum-v1")
        model.learn(100_000, reset_num_timesteps=False)

    Good:
        from stable_baselines3 import SAC
        model = SAC.load("agent", env="Pendulum-v1")
        model.load_replay_buffer("buffer")
        model.learn(100_000, reset_num_timesteps=False)
    """

    code = "S06"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `learn` of loaded models in files that fill no replay buffer in another way."""
        if "load_replay_buffer" in source.attributes or any(_find_uses_of_replay_buffers(source)):
            return
        for call, owner in source.find_method_calls("learn"):
            model = find_model(source, owner)
            if model is not None and model.is_loaded and not ALGORITHM_CLASSES[model.algorithm].on_policy:
                text = f"{model.algorithm} is loaded and continues learning with an empty replay buffer"
                yield Match(text, source.get_place(call))


def _find_uses_of_replay_buffers(source: Source) -> Iterator[ast.Attribute]:
    """Yield the uses of a model's `replay_buffer` that may fill the buffer: all except reading its size."""
    for node in source.find_nodes(ast.Attribute):
        parent = source.get_parent(node)
        is_size = isinstance(parent, ast.Attribute) and parent.attr in {"size", "pos", "full", "buffer_size"}
        if node.attr == "replay_buffer" and not is_size:
            yield node


class PickledInAThread(Rule):
    """Finds a buffer that a thread pickles while the training adds to it.

    Why: The file mixes old and new rows, or the dump fails because the container changed its size. A copy of the buffer
    may also need memory at a moment when the training needs it.
    Fix: Save between updates, or use a memory that other threads may save while it is filled: `holdall.ReplayMemory`.

    Bad:
        import pickle
        import threading

        def save(replay_buffer):
            with open("buffer.pkl", "wb") as file:
                pickle.dump(replay_buffer, file, protocol=5)

        threading.Thread(target=save, args=(buffer,)).start()

    Good:
        import pickle

        def save(replay_buffer):
            with open("buffer.pkl", "wb") as file:
                pickle.dump(replay_buffer, file, protocol=5)

        save(buffer)
    """

    code = "S07"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for functions that pickle a buffer and that a call runs in a thread."""
        calls = [*_find_pickling_calls(source, "dump"), *_find_pickling_calls(source, "dumps")]
        owners = [source.find_function(call) for call in calls]
        pickling = {owner.name for owner in owners if owner is not None}
        for call in source.calls:
            target = _get_thread_target(source, call)
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            is_lambda = isinstance(target, ast.Lambda) and any(target in source.ancestors(one) for one in calls)
            if is_lambda or name in pickling:
                function = "a lambda" if is_lambda else name
                text = f"{function} pickles a buffer in a thread, while other threads may add to the buffer"
                yield Match(text, source.get_place(call))


def _get_thread_target(source: Source, call: ast.Call) -> ast.expr | None:
    """Return the function that a call runs in a thread, or None if the call starts no thread."""
    if source.get_full_name(call.func) == "threading.Thread":
        return get_argument(call, "target")
    if isinstance(call.func, ast.Attribute) and call.func.attr == "submit" and call.args:
        return call.args[0]
    return None


class NormalisationNotSaved(Rule):
    """Finds a model that is saved without the statistics of its VecNormalize.

    Why: The loaded model gets observations on another scale than in training, and acts as if untrained.
    Fix: `env.save("vecnormalize.pkl")`, `CheckpointCallback(..., save_vecnormalize=True)`, or
    `holdall.sb3.CheckpointCallback`, which saves the statistics with the model.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize
        env = VecNormalize(make_vec_env("Pendulum-v1"))
        model = PPO("MlpPolicy", env)
        model.learn(100_000)
        model.save("agent")

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize
        env = VecNormalize(make_vec_env("Pendulum-v1"))
        model = PPO("MlpPolicy", env)
        model.learn(100_000)
        model.save("agent")
        env.save("vecnormalize.pkl")
    """

    code = "S08"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for files in which every `save` is that of a model."""
        normalises = any(source.get_full_name(call.func).endswith(".VecNormalize") for call in source.calls)
        saves = list(source.find_method_calls("save"))
        model_saves = [call for call, owner in saves if find_model(source, owner) is not None]
        is_saved = "save_vecnormalize" in source.keywords or any(source.find_calls("holdall.sb3.CheckpointCallback"))
        if normalises and model_saves and len(model_saves) == len(saves) and not is_saved:
            text = "the model is saved, but the statistics of VecNormalize are not"
            yield Match(text, source.get_place(model_saves[0]))
