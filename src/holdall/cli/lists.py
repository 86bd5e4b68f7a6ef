"""Options that take several words: `--profiles fast balanced` is `--profiles fast --profiles balanced`.

In:  the words of a command line.  Out: the same, with the option's name before each of its words.
A list ends with the next option, or with the name of a subcommand.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup


def spread(words: Sequence[str], options: Collection[str], stops: Collection[str] = ()) -> list[str]:
    """Repeat each of `options` before every word that belongs to it."""
    found: list[str] = []
    option, is_first = "", True
    for word in words:
        if word.startswith("-") or word in stops:
            option, is_first = (word if word in options else ""), True
            found.append(word)
        else:
            found += [word] if is_first or not option else [option, word]
            is_first = False
    return found


class ListsCommand(TyperCommand):
    """A command some of whose options take several words; subclasses name them."""

    lists: ClassVar[Collection[str]] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words."""
        return list(super().parse_args(ctx, spread(args, self.lists)))


class ListsGroup(TyperGroup):
    """A group some of whose own options take several words; subclasses name them."""

    lists: ClassVar[Collection[str]] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words up to a subcommand's name; what follows is the subcommand's."""
        own = next((place for place, word in enumerate(args) if word in self.commands), len(args))
        return list(super().parse_args(ctx, spread(args[:own], self.lists) + args[own:]))
