"""Rules about the size of a buffer against the memory there is."""

from __future__ import annotations

from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, run_rule
from holdall.tools.lint.run import BufferNeed, ConfiguredRun, Machine, OneOf, buffer_need, candidates, percent, sized

_SAFE_SHARE = 0.8  # of the limit; the rest is for the interpreter, the libraries and the networks


def _largest_that_fits(run: ConfiguredRun, needed: BufferNeed, machine: Machine) -> str:
    """Say what would fit into a comfortable share of the limit."""
    layout = needed.layout
    per_row = (layout.nbytes + layout.flatten_bytes) / layout.rows
    fitting = int(int(machine.limit_bytes * _SAFE_SHARE) // per_row)
    size = f"n_steps={fitting:,}" if run.algorithm.on_policy else f"buffer_size={fitting * layout.n_envs:,}"
    return f"{size} would take {percent(_SAFE_SHARE, 1)} of it"


def _buffer_words(run: ConfiguredRun, needed: BufferNeed) -> str:
    size = "rollout" if run.algorithm.on_policy else "replay buffer"
    text = f"the {size} of {needed.layout.transitions:,} transitions {needed.words} {sized(needed.resident_bytes)}"
    if not needed.is_certain:
        text += " once it is full"
    if needed.layout.flatten_bytes:
        text += f", and {sized(needed.peak_bytes)} while it is flattened"
    return text


def _buffer_match(run: ConfiguredRun, needed: BufferNeed, machine: Machine, limit: str, **numbers: int) -> Match:
    """Return what is found about a buffer and its limit: a warning at most if the run may be too short to fill it."""
    return Match(
        f"{_buffer_words(run, needed)}{limit}; {_largest_that_fits(run, needed, machine)}",
        run.place_of("buffer_size", "n_steps"),
        {"needed_bytes": needed.peak_bytes, "limit_bytes": machine.limit_bytes} | numbers,
        severity=None if needed.is_certain else Severity.WARNING,
    )


@run_rule("M01", "buffer-beyond-memory", Severity.ERROR)
def buffer_beyond_memory(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the buffer, as full as the run makes it, with this machine's memory.

    A warning where the number of steps is not known.

    Why: The buffer's pages are touched one by one as it fills, so the run starts well and is killed hours later. The
    figure is the buffer alone; the interpreter, the libraries and the networks come on top.
    Fix: Take the capacity that the message names, or `replay_buffer_class=holdall.sb3.ReplayBuffer`, which stores every
    observation once. `holdall plan` says what fits.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=1_000_000).learn(2_000_000)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=400_000)
    """
    needed = buffer_need(run, machine)
    if needed and needed.peak_bytes > (machine.ram_bytes if machine.is_contained else machine.limit_bytes):
        yield _buffer_match(run, needed, machine, f"; {machine.limit_name} is {sized(machine.limit_bytes)}")


@run_rule("M02", "buffer-near-limit", Severity.WARNING)
def buffer_near_limit(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Warns if the buffer alone takes more than 80 % of the memory there is.

    Why: What is left has to hold the interpreter, the libraries, the networks with their gradients and optimizer, and
    every environment. On the way to the limit the system starts to swap or to kill.
    Fix: Take the capacity that the message names, or a buffer that stores every observation once.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=700_000)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=600_000)
    """
    needed = buffer_need(run, machine)
    if needed and machine.limit_bytes * _SAFE_SHARE < needed.peak_bytes <= machine.limit_bytes:
        share = percent(needed.peak_bytes, machine.limit_bytes)
        limit = f": {share} of {machine.limit_name} ({sized(machine.limit_bytes)})"
        yield _buffer_match(run, needed, machine, limit)


@run_rule("M03", "buffer-beyond-container", Severity.ERROR)
def buffer_beyond_container(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds a buffer that fits into the machine, but not into its container.

    A warning where the number of steps is not known.

    Why: `free`, `psutil.virtual_memory()` and Stable-Baselines3's own warning see the host's memory. The kernel kills
    at the container's limit.
    Fix: Raise the container's limit (`docker run --memory`), or take the capacity that the message names.

    Bad (camera, limit_bytes=16GiB, limit_name=control group /):
        SAC("MultiInputPolicy", Dog(), buffer_size=500_000).learn(2_000_000)

    Good (camera, limit_bytes=16GiB, limit_name=control group /):
        SAC("MultiInputPolicy", Dog(), buffer_size=300_000)
    """
    needed = buffer_need(run, machine)
    if needed and machine.is_contained and machine.limit_bytes < needed.peak_bytes <= machine.ram_bytes:
        allowed = f"{machine.limit_name} allows {sized(machine.limit_bytes)}"
        limit = f"; the host has {sized(machine.ram_bytes)}, but {allowed}"
        yield _buffer_match(run, needed, machine, limit, ram_bytes=machine.ram_bytes)


@run_rule("M09", "buffer-never-fills", Severity.INFO)
def buffer_never_fills(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the buffer's capacity with the steps of the run.

    Why: What is never written is never resident, so a smaller buffer saves no memory here; but `save_replay_buffer`
    writes the whole capacity to disk, and a measured peak says nothing about a longer run.
    Fix: Set `buffer_size` to the steps of the run.

    Bad:
        from stable_baselines3 import SAC
        model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=200_000)
        model.learn(total_timesteps=50_000)

    Good:
        from stable_baselines3 import SAC
        model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=50_000)
        model.learn(total_timesteps=50_000)
    """
    size, steps = run.count("buffer_size"), run.total_timesteps
    if size is not None and steps is not None and size > steps:
        text = f"buffer_size={size:,} never fills in {steps:,} steps: {percent(steps, size)} of it is used"
        yield Match(text, run.place_of("buffer_size"), {"buffer_size": size, "total_timesteps": steps})


@run_rule("M10", "capacity-rounded-down", Severity.INFO)
def capacity_rounded_down(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Says how many transitions a replay buffer really holds when the number of environments does not divide it.

    Why: Stable-Baselines3 divides `buffer_size` by the number of environments and drops the rest.
    Fix: Make `buffer_size` a multiple of the number of environments.

    Bad:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=6), buffer_size=100_000)

    Good:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8), buffer_size=100_000)
    """
    size, count = run.count("buffer_size"), run.environments.number
    if size is None or count is None or size % count == 0:
        return
    held = max(size // count, 1) * count
    text = f"buffer_size={size:,} over {count} environments holds {held:,} transitions"
    yield Match(text, run.place_of("buffer_size"), {"buffer_size": size, "capacity": held})


@run_rule("M18", "comparison-never-fills", Severity.WARNING, sees_searches=True)
def comparison_never_fills(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Looks for a comparison of buffer sizes none of which the run fills.

    Why: A buffer's pages cost memory when they are written. Profiles of 200,000 and of 500,000 transitions take the
    same memory, and learn the same, in a run of 50,000 steps: the comparison measures nothing of what it compares.
    Fix: Train for more steps than the largest buffer holds, or pre-fill the buffers before measuring.

    Bad:
        from stable_baselines3 import SAC
        for buffer_size in (200_000, 300_000, 400_000, 500_000):
            model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=buffer_size)
            model.learn(total_timesteps=50_000)

    Good:
        from stable_baselines3 import SAC
        for buffer_size in (20_000, 50_000):
            model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=buffer_size)
            model.learn(total_timesteps=100_000)
    """
    searched = run.value("buffer_size")
    sizes = candidates(searched) if isinstance(searched, OneOf) else ()
    steps = [candidates(learn.total_timesteps.value) for learn in run.learns]
    if len(sizes) < 2 or len(steps) != 1 or not steps[0]:
        return
    longest = max(steps[0])
    if longest < min(sizes):
        yield Match(
            f"the sizes {min(sizes):,} to {max(sizes):,} are compared over {longest:,} steps, which fill none: "
            f"at most {percent(longest, min(sizes))} of the smallest is ever used",
            run.place_of("buffer_size"),
            {"smallest": min(sizes), "largest": max(sizes), "total_timesteps": longest},
        )
