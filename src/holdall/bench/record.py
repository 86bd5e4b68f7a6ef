"""One recording in a process of its own: `python -m holdall.bench.record --env ID --transitions N --out FILE`.

In:  an environment, which is the user's own code.  Out: a trace of random actions in it, and JSON lines of progress.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from gymnasium import spaces

from holdall.bench.child import emit
from holdall.bench.trace import Recorder
from holdall.errors import ArgumentError
from holdall.plan.environment import make, played

_TELL_EVERY = 200


def record(env: Any, transitions: int, stack: int, seed: int, file: Path) -> None:
    """Play at random, and write what was seen."""
    _require_flat(env.observation_space)
    recorder = Recorder(stack)
    begins = True
    for count, step in enumerate(itertools.islice(played(env, seed), transitions)):
        obs, action, reward, next_obs, terminated, truncated = step
        if begins:
            recorder.begin(obs)
        recorder.step(action, reward, next_obs, terminated, truncated)
        begins = terminated or truncated
        if count % _TELL_EVERY == 0:
            emit({"done": count, "total": transitions})
    recorder.save(file)


def _require_flat(space: spaces.Space[Any]) -> None:
    parts = list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]
    if not all(isinstance(part, spaces.Box) for part in parts):
        raise ArgumentError(f"env observes {space}; a trace holds a Box, or a Dict of them")


def main() -> None:
    """Read the command line and record."""
    parser = argparse.ArgumentParser(prog="python -m holdall.bench.record")
    parser.add_argument("--env", required=True)
    parser.add_argument("--wrapper", default="")
    parser.add_argument("--stack", type=int, default=1)
    parser.add_argument("--transitions", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    wanted = parser.parse_args()
    emit({"done": 0, "total": wanted.transitions})
    record(make(wanted.env, wanted.wrapper), wanted.transitions, wanted.stack, wanted.seed, wanted.out)


if __name__ == "__main__":
    main()
