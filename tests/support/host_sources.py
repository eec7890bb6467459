"""Signatures of functions in the sources of a host that is not installed here."""

from __future__ import annotations

import ast
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameter_names(package: Path, path: str) -> str | None:
    """Parameters of the function at a dotted path that begins with the name of ``package``; None: there is none.

    Only what stands in the module, or in the class itself: nothing that is imported, inherited, or made at run time.
    """
    _, *parts = path.split(".")
    folder = package
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    module = folder / (f"{parts.pop(0)}.py" if parts else "__init__.py")
    if not module.is_file() or not parts:
        return None
    body = ast.parse(module.read_text(encoding="utf-8")).body
    for name in parts:
        found = [node for node in body if isinstance(node, Function | ast.ClassDef) and node.name == name]
        if not found:
            return None
        node = found[-1]  # the last one counts
        body = node.body
    return None if isinstance(node, ast.ClassDef) else _names_of(node.args)


def _names_of(arguments: ast.arguments) -> str:
    """In the order of ``inspect.signature``."""
    varying = ([arguments.vararg] if arguments.vararg else [], [arguments.kwarg] if arguments.kwarg else [])
    ordered = [*arguments.posonlyargs, *arguments.args, *varying[0], *arguments.kwonlyargs, *varying[1]]
    return ", ".join(argument.arg for argument in ordered)
