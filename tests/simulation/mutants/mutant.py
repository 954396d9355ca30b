"""What a mutant is: data, and how its lines get into the service.

Invariants:

- An edit's original stands exactly once in its module: where the source has moved on, it says so and nothing runs.
- Nothing is written to disk: the import hook compiles the changed source, and a process has one mutant for its life.
- A mutant is killed by a promise it is known to break, never by an error of its own making.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

__all__ = ["Edit", "Moved", "Mutant", "infect", "kind_of"]

_PACKAGE: Final = "rollout_svc"


class Moved(LookupError):
    """Raised when an edit's original does not stand exactly once in its module any more."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One line, or the line that was its second line of defence.

    Attributes:
        module: below `rollout_svc`, dotted.
        original: a piece of its source that stands there exactly once.
        replacement: what stands there instead.
    """

    module: str
    original: str
    replacement: str

    @property
    def name(self) -> str:
        """The module's whole name."""
        return f"{_PACKAGE}.{self.module}"

    def check(self) -> None:
        """Raise Moved unless the original stands in the module exactly once."""
        self.apply(_source(self.name))

    def apply(self, source: str) -> str:
        """The module's source with the replacement in it."""
        found = source.count(self.original)
        if found != 1:
            raise Moved(f"{self.name} has {found} times, not once:\n{self.original}")
        return source.replace(self.original, self.replacement)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug.

    Attributes:
        name: of it.
        bug: what it does, as it was met elsewhere.
        edits: what to change; more than one where a second line of defence has to go as well.
        caught_by: the findings that may report it: promises, `hang`, `Deadlock`.
        sharded: it is looked for in sharded histories.
    """

    name: str
    bug: str
    edits: tuple[Edit, ...]
    caught_by: frozenset[str]
    sharded: bool = False

    def check(self) -> None:
        """Raise Moved unless each edit still has its place."""
        for edit in self.edits:
            edit.check()


def kind_of(broken: str) -> str:
    """Which promise, or other finding, a broken history names."""
    return broken.partition(":")[0]


def infect(mutant: Mutant) -> None:
    """Have the mutant's modules imported with its edits in them; they must not have been imported yet.

    Raises:
        Moved: an original is not where it was.
    """
    mutant.check()
    edits: dict[str, list[Edit]] = {}
    for edit in mutant.edits:
        edits.setdefault(edit.name, []).append(edit)
    if early := [name for name in edits if name in sys.modules]:
        raise ImportError(f"{early} were imported before the mutant was made")
    sys.meta_path.insert(0, _Finder(edits))


class _Loader(SourceFileLoader):
    """Compiles a module's source with its edits in it; neither reads nor writes bytecode."""

    edits: Sequence[Edit]

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        for edit in self.edits:
            source = edit.apply(source)
        code: CodeType = self.source_to_code(source.encode(), self.path)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, edits: dict[str, list[Edit]]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        edits = self._edits.get(fullname)
        if edits is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise Moved(f"there is no module {fullname}")
        loader = _Loader(fullname, spec.origin)
        loader.edits = edits
        spec.loader = loader
        return spec


def _source(name: str) -> str:
    """The source of a module, which is not imported; the packages above it are not either."""
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.submodule_search_locations is None:
        raise Moved(f"there is no package {_PACKAGE}")
    below = name.split(".")[1:]
    [root] = package.submodule_search_locations
    file = Path(root, *below).with_suffix(".py")
    if not file.is_file():
        raise Moved(f"there is no module {name}")
    return file.read_text(encoding="utf-8")
