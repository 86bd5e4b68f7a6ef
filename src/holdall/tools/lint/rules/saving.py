"""Rules about checkpoints: what they write, what a resumed run lacks, and buffers that are pickled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Edit, Place, Severity
from holdall.tools.lint.machine import Machine, format_size
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.source import Source, argument_of, has_unpacked_arguments
from holdall.tools.lint.source_sb3 import OFF_POLICY, model_of
from holdall.tools.lint.subjects import TrainedCallback, TrainedModel

_PROTOCOL = 5
_DEFAULT_IS_ENOUGH = (3, 14)
"""First Python version whose default pickle protocol is 5."""
_LARGE = re.compile(r"buffer|memory|replay|transition|trajector|experience|rollout|episode|dataset", re.IGNORECASE)
"""Names of objects that contain arrays by the gigabyte. A pickled dict of settings does not matter."""
_FACTORY = re.compile(r"\b(?:make|create|build)_")
"""Beginnings of names of functions that make a buffer."""


def _buffer_savers(model: TrainedModel) -> Iterator[TrainedCallback]:
    """Yield the callbacks that save the replay buffer."""
    for callback in model.callbacks:
        if callback.kind == "CheckpointCallback" and callback.settings.get("save_replay_buffer") is True:
            yield callback


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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Compare the sum with the free space of the disk."""
        buffer = model.buffer
        steps = model.total_timesteps
        if buffer is None or buffer.kind != "replay" or steps is None or machine.disk_bytes is None:
            return
        for callback in _buffer_savers(model):
            every = callback.count("save_freq")
            saves = steps // model.n_envs // every if every else 0
            written = saves * buffer.nbytes
            if written > machine.disk_bytes:
                text = (
                    f"{saves} checkpoints of {format_size(buffer.nbytes)} are {format_size(written)}, but the disk has "
                    f"{format_size(machine.disk_bytes)} free"
                )
                numbers = {
                    "checkpoints": saves,
                    "checkpoint_bytes": buffer.nbytes,
                    "disk_bytes": machine.disk_bytes,
                }
                yield Match(text, model.place, numbers)


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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Look for the option in callbacks of on-policy models."""
        if model.is_on_policy and any(_buffer_savers(model)):
            text = f"{model.algorithm} has no replay buffer, so save_replay_buffer=True does nothing"
            yield Match(text, model.place)


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
        for call in _pickling_calls(source, "dump"):
            given = argument_of(call, "protocol", 2)
            if has_unpacked_arguments(call) or (given is None and machine.python >= _DEFAULT_IS_ENOUGH):
                continue
            protocol = 4 if given is None else source.whole_number(given)
            if protocol is None or not 0 <= protocol < _PROTOCOL:
                continue
            used = "the default protocol (4)" if given is None else f"protocol {protocol}"
            text = f"{ast.unparse(call.args[0])} is pickled with {used}: each array is copied before it is written"
            yield Match(text, source.place(call), {"protocol": protocol}, _set_protocol(source, call, given))


def _set_protocol(source: Source, call: ast.Call, given: ast.expr | None) -> Edit | None:
    """Return the edit that makes the protocol 5, or None if the protocol is not a literal."""
    if isinstance(given, ast.Constant):
        return Edit(source.place(given), ast.unparse(given), str(_PROTOCOL))
    if given is not None:
        return None
    last = source.place([*call.args, *(keyword.value for keyword in call.keywords)][-1])
    end = Place(source.path, last.end_line, last.end_column, last.end_line, last.end_column)
    return Edit(end, "", f", protocol={_PROTOCOL}")


def _pickling_calls(source: Source, function: str) -> Iterator[ast.Call]:
    """Yield the calls of `pickle.dump` or `pickle.dumps` that pickle a buffer, judged by its name."""
    for call in source.calls_of(f"pickle.{function}", f"cloudpickle.{function}"):
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
        for call in _pickling_calls(source, "dumps"):
            text = f"pickle.dumps makes a second copy of {ast.unparse(call.args[0])} in memory"
            yield Match(text, source.place(call))


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
        if "load_replay_buffer" in source.attributes or any(_uses_of_replay_buffers(source)):
            return
        for call, owner in source.method_calls("learn"):
            model = model_of(source, owner)
            if model is not None and model.is_loaded and model.algorithm in OFF_POLICY:
                text = f"{model.algorithm} is loaded and continues learning with an empty replay buffer"
                yield Match(text, source.place(call))


def _uses_of_replay_buffers(source: Source) -> Iterator[ast.Attribute]:
    """Yield the uses of a model's `replay_buffer` that may fill it: all but a look at its size."""
    for node in source.of_kind(ast.Attribute):
        parent = source.parent(node)
        is_size = isinstance(parent, ast.Attribute) and parent.attr in {"size", "pos", "full", "buffer_size"}
        if node.attr == "replay_buffer" and not is_size:
            yield node


class PickledInAThread(Rule):
    """Finds a buffer that a thread pickles while the training adds to it.

    Why: The file mixes old and new rows, or the dump fails because the container changed its size. The memory of the
    copy is needed at a moment that nobody watches.
    Fix: Save between updates, or use a memory whose `save` may run beside `add`, such as `holdall.ReplayMemory.save`.

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
        """Look for functions that pickle a buffer and are handed to a thread."""
        calls = [*_pickling_calls(source, "dump"), *_pickling_calls(source, "dumps")]
        owners = [source.function(call) for call in calls]
        pickling = {owner.name for owner in owners if owner is not None}
        for call in source.calls:
            target = _thread_target(source, call)
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            is_lambda = isinstance(target, ast.Lambda) and any(target in source.ancestors(one) for one in calls)
            if is_lambda or name in pickling:
                who = "a lambda" if is_lambda else name
                yield Match(f"{who} pickles a buffer in a thread, while others may add to it", source.place(call))


def _thread_target(source: Source, call: ast.Call) -> ast.expr | None:
    """Return the function that a call hands to a thread, or None if there is none."""
    if source.dotted(call.func) == "threading.Thread":
        return argument_of(call, "target")
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
        normalises = any(source.dotted(call.func).endswith(".VecNormalize") for call in source.calls)
        saves = list(source.method_calls("save"))
        model_saves = [call for call, owner in saves if model_of(source, owner) is not None]
        is_saved = "save_vecnormalize" in source.keywords or any(source.calls_of("holdall.sb3.CheckpointCallback"))
        if normalises and model_saves and len(model_saves) == len(saves) and not is_saved:
            text = "the model is saved, but the statistics of VecNormalize are not"
            yield Match(text, source.place(model_saves[0]))
