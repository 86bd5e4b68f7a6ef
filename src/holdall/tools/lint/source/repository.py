"""The modules and data files of one repository, by what a script imports and opens.

In:  the path of a script.  Out: parsed modules beside it, and the contents of YAML, JSON and TOML files.
Invariant: only files below the repository's root are read, each once; nothing is imported or executed.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

_ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
_MOST_BYTES = 2 * 2**20  # of a file that is parsed
_MOST_TEXT_BYTES = 64 * 2**20  # of a file that is searched
_MOST_MODULES = 400
_MOST_SETTINGS = 4  # files that may be meant where a program does not say which
_DEEPEST_FOLDER = 3
_SETTINGS_FOLDERS = ("config", "configs", "conf", "cfg", "cfgs", "hyperparameters", "hyperparams", "params", "settings")
_SETTING = re.compile(r"buffer|memory|replay|batch_?size|gamma|n_steps", re.IGNORECASE)
_MOST_LOOKED_AT = 40  # of those that a script imports, and that they import
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+\(?([\w ,]*)|import[ \t]+([\w. ,]+))", re.MULTILINE
)

_OLDER_WORDS = [(re.compile(pattern, re.MULTILINE), newer) for pattern, newer in (
    (r"^([ \t]*(?:[^#'\"\n]*:[ \t]+)?)print[ \t]+(?:>>)?(?=[^\s(=.,)\]])", r"\1_ = "),
    (r"^([ \t]*except[ \t]+[\w.]+|[ \t]*except[ \t]*\([\w., ]+\)),[ \t]*(\w+)[ \t]*:", r"\1 as \2:"),
    (r"^([ \t]*)raise[ \t]+(\w+)[ \t]*,[ \t]*(.*)$", r"\1raise \2(\3)"),
    (r"\basync(?=[ \t]*=)|(?<=\.)async\b", "async_"),
    (r"(?<![\w.])(\d+)L\b", r"\1"), (r"(?<![\w.])0(?=[0-7]+\b(?!\.))", "0o"), (r"<>", "!="), (r"\t", "        "),
)]  # fmt: skip


@dataclass(eq=False, slots=True)
class Module:
    """One file of Python: its tree, and the names that running its own level gives values."""

    path: str
    tree: ast.Module
    is_main: bool = False
    names: dict[str, Any] = field(default_factory=dict)
    is_run: bool = False
    stars: list[str] = field(default_factory=list)  # modules of libraries whose names it has all


class Repository:
    """Files around a script."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.modules: dict[Path, Module] = {}  # those that a script imported; the next script finds them as they are
        self._trees: dict[Path, ast.Module | None] = {}
        # Every question about files is asked once.
        self._directory: Callable[[str], Path] = cache(lambda importer: Path(importer).resolve().parent)
        self._is_file: Callable[[str], bool] = cache(lambda path: Path(path).is_file())
        self._text: Callable[[Path], str] = cache(_text_of)
        self._data: Callable[[Path], Any] = cache(read_data)
        self._bases: Callable[[Path], dict[str, None]] = cache(self._find_bases)
        self._has_folder: Callable[[Path, str], bool] = cache(
            lambda here, name: any(Path(base, name).is_dir() for base in self._bases(here))
        )
        self._first: Callable[[Path, str, int], Path | None] = cache(lambda *key: next(self._candidates(*key), None))
        self._settings: Callable[[Path, tuple[str, ...]], list[tuple[str, Any]]] = cache(self._settings_near)

    @classmethod
    def around(cls, path: Path) -> Repository:
        """Return the repository of a file: the nearest directory above it that looks like a root, or its own."""
        if not path.is_file():
            return cls(None)
        start = path.resolve().parent
        marked = (one for one in (start, *start.parents) if any((one / mark).exists() for mark in _ROOT_MARKS))
        return cls(next(marked, start))

    def tree(self, path: Path) -> ast.Module | None:
        """Parse a file; None if that is not possible."""
        if path not in self._trees:
            is_read = len(self._trees) < _MOST_MODULES
            self._trees[path] = None
            with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                if is_read and path.stat().st_size <= _MOST_BYTES:
                    self._trees[path] = parse_quietly(path.read_bytes())
        return self._trees[path]

    def find(self, dotted: str, level: int, importer: str) -> Path | None:
        """Return the file that an import means, if it is one of this repository."""
        return None if self.root is None else self._first(self._directory(importer), dotted, level)

    def has_folder(self, name: str, importer: str) -> bool:
        """Whether there is a folder of this name beside a file, or above it in the repository."""
        return self.root is not None and self._has_folder(self._directory(importer), name)

    def imports_match(self, pattern: re.Pattern[str], text: str, path: str) -> bool:
        """Whether one of the files that a script imports, directly or through others, matches a pattern."""
        if self.root is None:
            return False
        files = self._imported(text, path)
        seen: set[Path] = set()
        for file in files:  # grows as imports are found
            if file not in seen and len(seen) < _MOST_LOOKED_AT:
                seen.add(file)
                if pattern.search(self._text(file)):
                    return True
                files += self._imported(self._text(file), str(file))
        return False

    def _imported(self, text: str, path: str) -> list[Path]:
        """Return the files of the repository that a text imports."""
        found = []
        for dots, package, names, plain in _IMPORT.findall(text):
            parts = [one.split(" as ")[0].strip() for one in (plain or names).split(",")]
            wanted = parts if plain else [package, *(f"{package}.{one}" if package else one for one in parts)]
            files = [self.find(one, len(dots), path) for one in wanted if one]
            found += [file for file in files if file is not None]
        return found

    def _candidates(self, here: Path, dotted: str, level: int) -> Iterator[Path]:
        bases = list(self._bases(here))
        if level:
            above = map(str, [here, *here.parents][level - 1 : level])
            bases = [one for one in above if one in bases]
        inner = dotted.replace(".", os.sep)
        for base in bases:
            target = f"{base}{os.sep}{inner}" if inner else str(base)
            for file in (f"{target}.py", f"{target}{os.sep}__init__.py")[not inner :]:
                if self._is_file(file):
                    yield Path(file)
        if inner and not level and (found := self._by_name(dotted.partition(".")[0])) is not None:
            folder = found.parent if found.name == "__init__.py" else found.with_suffix("")
            rest = folder.joinpath(*dotted.split(".")[1:])
            files = (rest.with_suffix(".py"), rest / "__init__.py") if "." in dotted else (found,)
            yield from (file for file in files if self._is_file(str(file)))

    def _find_bases(self, here: Path) -> dict[str, None]:
        """Return where a file of a folder finds its modules: there, above it in the repository, and in `src`."""
        root = self.root or here
        kept = [str(one) for one in (here, *here.parents) if one.is_relative_to(root)]
        return dict.fromkeys([*kept, str(root / "src")] if kept else [])

    def settings_files(self, importer: str, suffixes: tuple[str, ...]) -> list[tuple[str, Any]]:
        """Return the data files near a script that hold settings of a training, each with its name."""
        return [] if self.root is None else self._settings(self._directory(importer), suffixes)

    def _settings_near(self, here: Path, suffixes: tuple[str, ...]) -> list[tuple[str, Any]]:
        root = self.root or here
        places = dict.fromkeys(base / folder for base in (here, root) for folder in ("", *_SETTINGS_FOLDERS))
        files = [Path(one.path) for place in places for one in _entries(str(place))[:_MOST_LOOKED_AT]]
        named = [file for file in files if file.suffix in suffixes and _SETTING.search(self._text(file))]
        found = [(file.name, read_data(file)) for file in named[: _MOST_SETTINGS + 1]]
        return found if len(found) <= _MOST_SETTINGS and all(isinstance(data, dict) for _, data in found) else []

    def _by_name(self, name: str) -> Path | None:
        """Return the one file or package of the repository with a name, wherever it is: people add to sys.path."""
        found = self._named.get(name, [])
        return found[0] if len(found) == 1 else None

    @cached_property
    def _named(self) -> dict[str, list[Path]]:
        named: dict[str, list[Path]] = {}
        waiting = [(str(self.root), 0)]
        for folder, depth in waiting:  # grows as folders are found
            for entry in _entries(folder):
                is_folder, (stem, _, ending) = entry.is_dir(), entry.name.rpartition(".")
                if is_folder and depth < _DEEPEST_FOLDER and len(waiting) < _MOST_MODULES:
                    waiting.append((entry.path, depth + 1))
                if is_folder and Path(entry.path, "__init__.py").is_file():
                    named.setdefault(entry.name, []).append(Path(entry.path, "__init__.py"))
                elif ending == "py" and stem != "__init__" and not is_folder:
                    named.setdefault(stem, []).append(Path(entry.path))
        return named

    def data(self, name: str, importer: str) -> Any:
        """Return what a YAML, JSON or TOML file beside a script holds; None if there is none."""
        file = self._located(name, importer)
        return None if file is None else self._data(file)

    def text_of(self, name: str, importer: str) -> str:
        """Return what a file says that a program names; nothing if it is not there."""
        found = self._located(name, importer)
        return self._text(found) if found is not None else ""

    def _located(self, name: str, importer: str) -> Path | None:
        if self.root is None or not name or "\0" in name:
            return None
        here = self._directory(importer)
        files = ((base / name).resolve() for base in (here, self.root, Path.cwd()))
        return next((file for file in files if file.is_relative_to(self.root) and self._is_file(str(file))), None)


def _text_of(path: Path) -> str:
    try:
        is_short = path.is_file() and path.stat().st_size <= _MOST_TEXT_BYTES  # a pipe would be waited for
        return path.read_text(encoding="utf-8", errors="replace") if is_short else ""
    except OSError:
        return ""


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            entries = [one for one in found if not one.name.startswith(".") and not one.is_symlink()]
    except OSError:
        return []
    return sorted(entries, key=lambda one: one.name)


def read_data(file: Path) -> Any:
    """Parse a data file by its ending; None if that is not possible."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return None
        return _READERS.get(file.suffix, _read_yaml)(file.read_text(encoding="utf-8"))
    except Exception:
        return None


def _read_yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415  an extra: scripts are read without it

    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _read_ini(text: str) -> Any:
    parser = configparser.ConfigParser()
    parser.read_string(text)
    return {name: dict(parser[name]) for name in parser.sections()}


_READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".ini": _read_ini,
    ".cfg": _read_ini,
}


def parse_quietly(source: str | bytes) -> ast.Module:
    """Parse source text; what Python would only warn about, such as unknown escapes, is not for lint to report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except SyntaxError:
            older = _of_python_3(source if isinstance(source, str) else source.decode(errors="replace"))
            if older != source:
                with suppress(SyntaxError, ValueError):
                    return ast.parse(older)
            raise


def _of_python_3(text: str) -> str:
    """Write what only Python 2, or 3.6, accepts in words of today, line by line."""
    for pattern, newer in _OLDER_WORDS:
        text = pattern.sub(newer, text)
    return text
