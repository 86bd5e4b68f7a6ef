"""Rules about checkpoints: what is saved, resumed and forgotten, and buffers that are pickled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Edit, Severity, SourceRange
from holdall.tools.lint.rule import Match, run_rule, script_rule
from holdall.tools.lint.run import ConfiguredRun, Machine, algorithm_by_import, buffer_need, sized, whole
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script, argument_of
from holdall.tools.lint.source.values import InstanceValue, ListValue, likely

_PROTOCOL = 5
_DEFAULT_IS_ENOUGH = (3, 14)  # pickle's default protocol is 5 from this version on
# What holds arrays by the gigabyte; a pickled dict of settings does not matter.
_LARGE = re.compile(r"buffer|memory|replay|transition|trajector|experience|rollout|episode|dataset", re.IGNORECASE)


def _saves_buffer(run: ConfiguredRun) -> Iterator[tuple[SourceRange, int | None]]:
    """Yield where checkpoints include the buffer, and every how many calls."""
    for callback in run.callbacks:
        if callback.kind == "CheckpointCallback" and callback.value("save_replay_buffer") is True:
            yield callback.settings["save_replay_buffer"].place, whole(callback.value("save_freq"))


@run_rule("S01", "checkpoints-beyond-disk", Severity.WARNING)
def checkpoints_beyond_disk(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Adds up the replay buffers that a CheckpointCallback writes.

    Why: Every checkpoint writes the whole buffer, full or not, into a file of its own, and none is ever deleted.
    Fix: Save less often, delete old files, or `holdall.sb3.CheckpointCallback`, which writes only what is new since the
    last checkpoint.

    Bad (camera):
        from stable_baselines3.common.callbacks import CheckpointCallback
        SAC("MultiInputPolicy", Dog(), buffer_size=200_000).learn(
            1_000_000, callback=CheckpointCallback(10_000, "models", save_replay_buffer=True)
        )

    Good (camera):
        from stable_baselines3.common.callbacks import CheckpointCallback
        SAC("MultiInputPolicy", Dog(), buffer_size=200_000).learn(
            1_000_000, callback=CheckpointCallback(500_000, "models", save_replay_buffer=True)
        )
    """
    needed, steps, count = buffer_need(run, machine), run.total_timesteps, run.environments.number
    if needed is None or steps is None or not count or machine.disk_bytes is None or run.algorithm.on_policy:
        return
    for place, every in _saves_buffer(run):
        saves = steps // count // every if every else 0
        written = saves * needed.layout.nbytes
        if written > machine.disk_bytes:
            yield Match(
                f"{saves} checkpoints of {sized(needed.layout.nbytes)} are {sized(written)}, the disk has "
                f"{sized(machine.disk_bytes)} free",
                place,
                {"checkpoints": saves, "checkpoint_bytes": needed.layout.nbytes, "disk_bytes": machine.disk_bytes},
            )


@run_rule("S02", "no-replay-buffer-to-save", Severity.INFO)
def no_replay_buffer_to_save(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds `save_replay_buffer=True` where there is no replay buffer.

    Why: On-policy algorithms have a rollout that is used once and dropped. The option does nothing: it neither takes
    memory nor saves anything.
    Fix: Leave it out.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        callback = CheckpointCallback(10_000, "models", save_replay_buffer=True)
        PPO("MlpPolicy", "Pendulum-v1").learn(100_000, callback=callback)

    Good:
        from stable_baselines3 import SAC
        from stable_baselines3.common.callbacks import CheckpointCallback
        callback = CheckpointCallback(10_000, "models", save_replay_buffer=True)
        SAC("MlpPolicy", "Pendulum-v1").learn(100_000, callback=callback)
    """
    for place, _ in _saves_buffer(run) if run.algorithm.on_policy else ():
        text = f"{run.algorithm.name} has no replay buffer: save_replay_buffer=True does nothing"
        yield Match(text, place, edit=Edit(place, "True", "False"))


@script_rule("S04", "loads-beside-old-buffer", Severity.WARNING, words=("load_replay_buffer",))
def loads_beside_old_buffer(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds a replay buffer that is loaded while a filled one is still there.

    Why: The new buffer is read completely before it takes the old one's place: for that time both are in memory.
    Fix: `model.replay_buffer = None` before `model.load_replay_buffer(...)`.

    Bad (camera):
        model = SAC("MultiInputPolicy", Dog(), buffer_size=500_000)
        model.learn(1_000_000)
        model.load_replay_buffer("buffer.pkl")

    Good (camera):
        model = SAC("MultiInputPolicy", Dog(), buffer_size=500_000)
        model.load_replay_buffer("buffer.pkl")
        model.learn(1_000_000)
    """
    if any(one.attr == "replay_buffer" and isinstance(one.ctx, ast.Store) for one in script.of_kind(ast.Attribute)):
        return
    runs = {run.place: run for run in training.runs}
    for loaded in training.recorded("load_replay_buffer"):
        run = runs.get(training.interpreter.place(loaded.value.node))
        taught = [one.node for one in training.recorded("learn") if one.value is loaded.value]
        learnt = any(_line(node) < _line(loaded.node) for node in taught)
        needed = buffer_need(run, machine) if run is not None and learnt else None
        if needed and needed.resident_bytes + needed.layout.nbytes > machine.limit_bytes:
            yield Match(
                f"the old buffer of {sized(needed.resident_bytes)} and the loaded one of "
                f"{sized(needed.layout.nbytes)} are in memory together; {machine.limit_name} is "
                f"{sized(machine.limit_bytes)}",
                script.place(loaded.node),
                {"needed_bytes": needed.resident_bytes + needed.layout.nbytes, "limit_bytes": machine.limit_bytes},
            )


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


@script_rule("S06", "resumes-with-empty-buffer", Severity.WARNING, words=("load",))
def resumes_with_empty_buffer(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds an off-policy model that is loaded and trained on without its replay buffer.

    Why: `model.save` leaves the replay buffer out. A resumed run learns from the first few new transitions alone, at
    full rate, and can unlearn what it knew before the buffer has filled again.
    Fix: `model.save_replay_buffer` and `model.load_replay_buffer`, or `holdall.sb3.CheckpointCallback`, which saves
    both together and in little memory. If that is too large, train again only after `learning_starts` new steps.

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
    if {"load_replay_buffer", "replay_buffer"} & script.attributes:
        return
    loaded = {id(one.value) for one in training.recorded("loaded")}
    for learn in training.recorded("learn"):
        made = algorithm_by_import(learn.value.kind) if id(learn.value) in loaded else None
        if made and not made.on_policy:
            when = f" (when {' and '.join(learn.path)})" if learn.path else ""
            text = f"{made.name} is loaded and goes on learning with an empty replay buffer{when}"
            yield Match(text, script.place(learn.node))


@script_rule("S08", "normalisation-not-saved", Severity.WARNING, words=("VecNormalize",))
def normalisation_not_saved(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds a model that is saved without the statistics of its VecNormalize.

    Why: A loaded model gets observations on another scale than it was trained on, and acts as if untrained.
    Fix: `env.save("vecnormalize.pkl")`, `CheckpointCallback(..., save_vecnormalize=True)`, or
    `holdall.sb3.CheckpointCallback`, which saves them with the model.

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
    normalised = [call for call in script.calls if script.dotted(call.func).endswith(".VecNormalize")]
    saves = list(script.method_calls("save"))
    models = [call for call, owner in saves if training.constructed(owner)]
    saved = "save_vecnormalize" in script.keywords or any(script.calls_of("holdall.sb3.CheckpointCallback"))
    if normalised and models and len(models) == len(saves) and not saved:
        yield Match("the model is saved, and the statistics of VecNormalize are not", script.place(models[0]))


@script_rule("S03", "pickle-copies-arrays", Severity.WARNING, words=("pickle",))
def pickle_copies_arrays(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds buffers that are pickled with a protocol before 5.

    Why: Up to protocol 4 (the default before Python 3.14) every array is copied into a bytes object before it is
    written: one array of 100 GB needs 100 GB more. Protocol 5 writes arrays from where they lie.
    Fix: `pickle.dump(buffer, file, protocol=5)`; into a gzip file too, it streams.

    Bad:
        import pickle
        with open("buffer.pkl", "wb") as file:
            pickle.dump(replay_buffer, file)

    Good:
        import pickle
        with open("buffer.pkl", "wb") as file:
            pickle.dump(replay_buffer, file, protocol=5)
    """
    for call in _pickles(script, training, "dump"):
        given = argument_of(call, "protocol", 2)
        if any(k.arg is None for k in call.keywords) or (given is None and machine.python >= _DEFAULT_IS_ENOUGH):
            continue
        number = 4 if given is None else whole(training.value(given))
        if number is None or not 0 <= number < _PROTOCOL:
            continue
        used = "the default protocol (4)" if given is None else f"protocol {number}"
        text = f"{ast.unparse(call.args[0])} is pickled with {used}: each array is copied before it is written"
        yield Match(text, script.place(call), {"protocol": number}, edit=_edit(script, call, given))


def _edit(script: Script, call: ast.Call, given: ast.expr | None) -> Edit | None:
    if given is not None:
        is_written_out = isinstance(given, ast.Constant)
        return Edit(script.place(given), ast.unparse(given), str(_PROTOCOL)) if is_written_out else None
    last = script.place([*call.args, *(k.value for k in call.keywords)][-1])
    end = SourceRange(script.path, last.end_line, last.end_column, last.end_line, last.end_column)
    return Edit(end, "", f", protocol={_PROTOCOL}")


def _pickles(script: Script, training: TrainingReader, function: str) -> Iterator[ast.Call]:
    """Yield the calls that pickle something large, or an object that has it."""
    for call in script.calls_of(f"pickle.{function}", f"cloudpickle.{function}"):
        if call.args and (_LARGE.search(ast.unparse(call.args[0])) or _has_buffer(training, call.args[0])):
            yield call


def _has_buffer(training: TrainingReader, node: ast.expr) -> bool:
    value = likely(training.interpreter.seen(node))
    held = value.attributes.items() if isinstance(value, InstanceValue) else ()
    return any(
        isinstance(one, InstanceValue | ListValue) and _LARGE.search(f"{name} {getattr(one, 'kind', '')}")
        for name, one in held
    )


@script_rule("S05", "pickled-into-memory", Severity.WARNING, words=("pickle",))
def pickled_into_memory(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds buffers that are pickled into one bytes object.

    Why: `pickle.dumps` holds the whole buffer a second time, and compressing the result holds a third.
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
    for call in _pickles(script, training, "dumps"):
        yield Match(f"pickle.dumps holds {ast.unparse(call.args[0])} once more in memory", script.place(call))


@script_rule("S07", "pickled-in-a-thread", Severity.WARNING, words=("pickle",))
def pickled_in_a_thread(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds a buffer that a thread pickles while the training adds to it.

    Why: The file mixes old and new rows, or the dump fails because the container changed size. The thread also needs
    the copy's memory at a moment when nobody watches.
    Fix: Save between updates, or use a memory whose `save` may run beside `add` (`holdall.ReplayMemory.save`).

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
    calls = [*_pickles(script, training, "dump"), *_pickles(script, training, "dumps")]
    pickling = {owner.name for call in calls if (owner := script.function(call))}
    for call in script.calls:
        if (name := _run_in_thread(script, call)) in pickling:
            yield Match(f"{name} pickles a buffer in a thread, while others may add to it", script.place(call))


def _run_in_thread(script: Script, call: ast.Call) -> str:
    """Return the name of the function that a call hands to a thread."""
    target = argument_of(call, "target") if script.dotted(call.func) == "threading.Thread" else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "submit" and call.args:
        target = call.args[0]
    return target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
