"""What the demo's trainings measured, as it travels from their processes to the story."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one training; all of them measured in its own process."""

    buffer: str
    bytes_per_transition: float  # slope of the process's unique memory over the transitions held
    peak_bytes: int  # resident, of the whole process, with all transitions held
    steps_per_second: float  # median over the steps that train; a step takes the environment, a batch and a gradient
    transitions: int  # held at the end
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """A checkpoint, and the batches that its memory draws next."""

    step: int
    batches_sha256: str
    seconds: float  # to save, or to load
    checkpoint_bytes: int
