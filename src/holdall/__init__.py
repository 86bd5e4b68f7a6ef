"""Experience memory for deep reinforcement learning: exact, in a fraction of the memory."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("holdall")
