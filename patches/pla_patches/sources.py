"""A host that is not installed, read from its sources: what is where, and how that differs from what is recorded.

Nothing of it is imported, so it needs none of its dependencies.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import zipfile
import zlib
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

from pla_patches.hosts import HOSTS, Host
from pla_patches.hosts.signature import Signature
from pla_sglang.common.errors import ConfigError

PACKAGE = "sglang"
_OF_EVERY_CLASS = {"__repr__": "self"}  # also where it does not stand in the class
Function = ast.FunctionDef | ast.AsyncFunctionDef
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)


class Sources:
    """The package of one host, in a wheel or in a folder where a wheel is unpacked (site-packages is such a folder).

    Raises ConfigError, in one line, for a file that cannot be read, at construction and when a module of it is read.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._trees: dict[str, ast.Module | None] = {}  # by dotted name; None: no such module
        try:
            root: Traversable = file if file.is_dir() else zipfile.Path(file)
            names = [entry.name for entry in root.iterdir()]
        except _UNREADABLE as error:
            raise ConfigError(f"{file} is no wheel, and no folder where one is unpacked: {error}") from None
        records = [found for name in names if (found := re.fullmatch(rf"{PACKAGE}-([^-]+)\.dist-info", name))]
        if PACKAGE not in names or len(records) != 1:
            raise ConfigError(f"{file} has no {PACKAGE}/ beside one {PACKAGE}-VERSION.dist-info/")
        self.version: str = records[0][1]
        self.package = root / PACKAGE

    def parameter_names(self, target: str) -> str | None:
        """Parameters of the function at a dotted path, joined by ", "; None: there is none.

        Only what stands in the module, or in the class itself: nothing that is imported or inherited.
        """
        module, *parts = self._split(target)
        owner: ast.AST | None = None
        node: ast.AST | None = self._tree(module)
        for name in parts:
            owner, node = node, _member(node, name)
        if node is None and isinstance(owner, ast.ClassDef):
            return _OF_EVERY_CLASS.get(parts[-1])
        return _names_of(node.args) if isinstance(node, Function) else None

    def overrides(self, target: str, other: str) -> bool:
        """True if ``target`` is a method of a class that is derived from the class of the method ``other``."""
        module, *parts = self._split(target)
        return len(parts) == 2 and other.rpartition(".")[0] in [*self._class_and_bases(module, parts[0])][1:]

    def find_moved(self, target: str) -> Signature | None:
        """Where a function has gone: its name with other underscores, a base class, a class or module elsewhere."""
        module, *parts = self._split(target)
        name = parts[-1].strip("_")
        if len(parts) == 2:
            for owner in self._class_and_bases(module, parts[0]):
                if found := self._named(owner, name):
                    return found
        elif found := self._named(module, name):
            return found
        owner_name = parts[0] if len(parts) == 2 else None
        for other in self._modules_with(rf"class {owner_name}\b" if owner_name else rf"def _*{name}\b"):
            if found := self._named(f"{other}.{owner_name}" if owner_name else other, name):
                return found
        return None

    def _split(self, target: str) -> list[str]:
        """The dotted name of the module, then the names inside it."""
        parts = target.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if self._tree(module) is not None:
                return [module, *parts[count:]]
        return parts

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            self._trees[module] = self._parse(module)
        return self._trees[module]

    def _parse(self, module: str) -> ast.Module | None:
        _, *parts = module.split(".")
        folder = self.package
        for part in parts[:-1]:
            folder = folder / part
        file = folder / f"{parts[-1]}.py" if parts else self.package / "__init__.py"
        if not file.is_file():
            file = folder / parts[-1] / "__init__.py" if parts else file
        if not file.is_file():
            return None
        try:
            return ast.parse(self._text(file))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{self.file}: {module} is no Python that we can read: {error}") from None

    def _text(self, file: Traversable) -> str:
        try:
            return file.read_bytes().decode("utf-8", errors="replace")
        except _UNREADABLE as error:
            raise ConfigError(f"{self.file}: {file.name} cannot be read: {error}") from None

    def _class_and_bases(self, module: str, name: str) -> Iterator[str]:
        """Dotted paths of a class and of those that it inherits from, as far as imports by name lead."""
        node = _member(self._tree(module), name)
        if not isinstance(node, ast.ClassDef):
            return
        yield f"{module}.{name}"
        imported = _imports_of(self._tree(module))
        for base in node.bases:
            where, _, base_name = imported.get(ast.unparse(base), f"{module}.{ast.unparse(base)}").rpartition(".")
            yield from self._class_and_bases(where, base_name)

    def _named(self, owner: str, name: str) -> Signature | None:
        """The function of ``owner`` that is called ``name`` but for outer underscores."""
        module, *parts = self._split(owner)
        node: ast.AST | None = self._tree(module)
        for part in parts:
            node = _member(node, part)
        for member in getattr(node, "body", ()):
            if isinstance(member, Function) and member.name.strip("_") == name:
                return Signature(f"{owner}.{member.name}", _names_of(member.args))
        return None

    def _modules_with(self, pattern: str) -> Iterator[str]:
        wanted = re.compile(rf"^{pattern}", re.MULTILINE)
        for module, file in _python_files(self.package, PACKAGE):
            if wanted.search(self._text(file)):
                yield module


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    found: ast.AST | None = None
    for one in getattr(node, "body", ()):
        if isinstance(one, Function | ast.ClassDef) and one.name == name:
            found = one  # the last one counts
    return found


def _imports_of(tree: ast.Module | None) -> dict[str, str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)] if tree else []
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def _python_files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            yield from _python_files(entry, f"{name}.{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}.{entry.name.removesuffix('.py')}".removesuffix(".__init__"), entry


def _names_of(arguments: ast.arguments) -> str:
    """In the order of ``inspect.signature``."""
    varying = ([arguments.vararg] if arguments.vararg else [], [arguments.kwarg] if arguments.kwarg else [])
    ordered = [*arguments.posonlyargs, *arguments.args, *varying[0], *arguments.kwonlyargs, *varying[1]]
    return ", ".join(argument.arg for argument in ordered)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One recorded function that a host has otherwise. ``found``: None where it has nothing of the kind."""

    key: str
    recorded: Signature
    found: Signature | None

    @property
    def how(self) -> str:
        if self.found is None:
            return "gone"
        return "parameters" if self.found.target == self.recorded.target else "moved"

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.recorded.target} not found"
        before, now = self.recorded.parameters.split(", "), self.found.parameters.split(", ")
        changes = [
            *(f"with {name}" for name in now if name not in before),
            *(f"without {name}" for name in before if name not in now),
        ]
        if not changes and now != before:
            changes = [f"in another order: {self.found.parameters}"]
        moved = f" is {self.found.target}" if self.found.target != self.recorded.target else ""
        return f"{self.recorded.target}{moved}" + (f" {', '.join(changes)}" if changes else "")


def compare(sources: Sources, recorded: Host) -> list[Difference]:
    """Every recorded function that ``sources`` have otherwise, in the order of the record; empty: all fit."""
    found = {key: _find(sources, key, there) for key, there in recorded.signatures.items()}
    return [Difference(key, there, found[key]) for key, there in recorded.signatures.items() if found[key] != there]


def _find(sources: Sources, key: str, there: Signature) -> Signature | None:
    """Where it is recorded, else where another host has it, else wherever it has gone.

    A class that overrides what is recorded is what the host calls, so it has moved there.
    """
    known = [there.target, *(one.signatures[key].target for one in HOSTS if key in one.signatures)]
    found = [
        Signature(target, parameters)
        for target in dict.fromkeys(known)
        if (parameters := sources.parameter_names(target)) is not None
    ]
    overriding = [one for one in found[1:] if sources.overrides(one.target, found[0].target)]
    return next(iter([*overriding, *found]), None) or sources.find_moved(there.target)
