"""The tree of exceptions in ``errors.py``, and the list in CONTRIBUTING.md of where everything is caught."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from pla_sglang.common import errors

ROOT = Path(__file__).resolve().parent.parent
FILES = [file for top in ("pla_sglang", "kernels", "patches", "graphs") for file in sorted((ROOT / top).rglob("*.py"))]
TREES = [ast.parse(file.read_text(encoding="utf-8")) for file in FILES]

BROAD = {"Exception", "BaseException"}
SECTION = re.compile(r"^## Where everything is caught$(.*?)^## ", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`.*) \| (.*) \|$", re.MULTILINE)
NODE = re.compile(r"^(?P<lines>[│├└─ ]*)(?P<name>\w+)(?: {2,}(?P<meaning>.+))?$")


def catches_everything(node: ast.AST) -> bool:
    """True for an ``except`` without a class, or with one that has nearly all others below it, and for ``suppress``."""
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or bool(
            BROAD & {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
        )
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("suppress")
        and bool(BROAD & {ast.unparse(arg) for arg in node.args})
    )


def places(node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions of a module that catch everything, as ``Class.method`` or ``function``."""
    for child in ast.iter_child_nodes(node):
        inside = within
        if isinstance(child, ast.ClassDef):
            inside = (child.name,)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
            not within or isinstance(node, ast.ClassDef)
        ):
            inside = (*within, child.name)
        if catches_everything(child):
            yield ".".join(within) or "module"
        yield from places(child, inside)


def test_everything_is_caught_only_where_a_reason_is_given() -> None:
    section = SECTION.search((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert section is not None
    rows = ROW.findall(section[1])
    assert all(why for _, why in rows)
    listed = [name for where, _ in rows for name in re.findall(r"`([^`]+)`", where)]
    assert len(listed) == len(set(listed)), "a place stands on one line"
    assert set(listed) == {place for tree in TREES for place in places(tree)}


def parents_drawn() -> dict[str, str]:
    """Class -> the class that it hangs from in the drawing; roots are left out."""
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines()[1:]:
        if not line:
            continue
        node = NODE.match(line)
        assert node is not None, line
        assert node["meaning"] or node["name"] == "PlaError", f"{line}: what it means is not said"
        above[len(node["lines"]) // 4 :] = [node["name"]]
        if len(above) > 1:
            assert node["name"] not in drawn, f"{node['name']} is drawn twice"
            drawn[node["name"]] = above[-2]
    return drawn


def parents_in_code() -> dict[str, str]:
    """Exception class of the product -> its first base."""
    bases = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def is_exception(name: str) -> bool:
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return True
        return name.endswith("Exception") or any(map(is_exception, bases.get(name, ())))

    return {name: of[0] for name, of in bases.items() if is_exception(name) and name != "PlaError"}


def test_the_drawing_of_the_exceptions_is_whole() -> None:
    """A class whose first base is neither ours nor FastAPI's would not be caught where commands end with one line."""
    assert parents_drawn() == parents_in_code()
