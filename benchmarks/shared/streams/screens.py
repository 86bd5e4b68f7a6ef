"""Colour screens of 144 x 160, four of them stacked: what a Game Boy or a cropped Atari screen gives.

Frames are noise, which nothing can compress, or a game that ale-py plays. Frames are stacked along the last axis. A
buffer gets views with channels first, as Stable-Baselines3's own wrappers make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.streams import channels_first

SCREEN = (144, 160, 3)
STACK = 4
OBSERVED = (STACK * SCREEN[2], *SCREEN[:2])
GAME = "Seaquest"
_CROPPED_ROWS = slice(40, 40 + SCREEN[0])
_SKIPPED_FRAMES = 4

Frame = NDArray[np.uint8]
Source = Callable[[], tuple[Frame, bool]]
"""Gives the next frame, and whether an episode begins with it."""


def stacks(sources: list[Source]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.bool_]]]:
    """Yield the stacks of all lanes, and in which of them an episode began."""
    stack = np.zeros((len(sources), *SCREEN[:2], STACK * SCREEN[2]), np.uint8)
    while True:
        stack = np.roll(stack, -SCREEN[2], axis=-1)
        began = np.zeros(len(sources), np.bool_)
        for lane, source in enumerate(sources):
            frame, began[lane] = source()
            if began[lane]:
                stack[lane] = 0
            stack[lane, ..., -SCREEN[2] :] = frame
        yield channels_first(stack), began


def noise(seed: int) -> Source:
    """Make frames of which no two are alike. An episode lasts 1,000 steps."""
    generator = np.random.default_rng(seed)
    steps = 0

    def source() -> tuple[Frame, bool]:
        nonlocal steps
        steps += 1
        return generator.integers(0, 256, SCREEN, np.uint8), steps % 1_000 == 1

    return source


def game(seed: int) -> Source:
    """Play at random, and crop the screen to the Game Boy's size."""
    from ale_py import ALEInterface, LoggerMode, roms  # noqa: PLC0415  an extra, and only for this source

    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setInt("random_seed", seed)
    rom: Any = roms.get_rom_path(GAME.lower())
    ale.loadROM(rom)
    generator = np.random.default_rng(seed)
    actions = ale.getMinimalActionSet()
    screen = np.empty((*ale.getScreenDims(), 3), np.uint8)
    begins = True

    def source() -> tuple[Frame, bool]:
        nonlocal begins
        began = begins
        begins = False
        for _ in range(_SKIPPED_FRAMES):
            ale.act(actions[generator.integers(len(actions))])
        if ale.game_over():
            ale.reset_game()
            begins = True
        ale.getScreenRGB(screen)
        return screen[_CROPPED_ROWS], began

    return source
