"""What the seam table says of SGLang's next version, against its sources.

``PLA_NEXT_SGLANG`` is the folder of its package; nothing of it is imported, so it needs none of its dependencies.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.host_sources import parameter_names

from pla_patches import host
from pla_patches.seam import Seam
from pla_patches.table import table
from pla_patches.table.targets import CONSTRUCTED, NEXT_HOST, PARAMETERS

VARIABLE = "PLA_NEXT_SGLANG"
SEAMS = {seam.target: seam for seam in table()}
MODULE = """
def plain(a, *rest, b=1, **keywords): ...

class Some:
    async def method(self, first, /, second): ...

class Derived(Some):
    def own(self): ...
"""


@pytest.fixture(scope="module")
def package() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no folder with the sources of sglang {host.NEXT}")
    folder = Path(named)
    version = (folder / "_version.py").read_text(encoding="utf-8")
    assert f"'{host.NEXT}'" in version, f"{folder} is not sglang {host.NEXT}"
    return folder


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_targets_are_there_as_the_table_says(seam: Seam, package: Path) -> None:
    there = seam.next_host
    if there is None or there.target != seam.target:
        assert parameter_names(package, seam.target) is None
    if there is not None:
        assert parameter_names(package, there.target) == there.parameters


@pytest.mark.parametrize("constructor", CONSTRUCTED)
def test_constructors_that_we_call_are_as_the_table_says(constructor: str, package: Path) -> None:
    assert parameter_names(package, constructor) == CONSTRUCTED[constructor][1]


def test_what_differs_is_a_target_and_does_differ() -> None:
    assert NEXT_HOST.keys() <= PARAMETERS.keys()
    for target, there in NEXT_HOST.items():
        assert there is None or (there.target, there.parameters) != (target, PARAMETERS[target]), target


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("host.part.module.plain", "a, rest, b, keywords"),
        ("host.part.module.Some.method", "self, first, second"),
        ("host.part.module.Derived.own", "self"),
        ("host.part.module.Derived.method", None),  # inherited: a hook there would not be looked up
        ("host.part.module.Some", None),
        ("host.part.module.none", None),
        ("host.part.none.plain", None),
        ("host.part", None),
    ],
)
def test_signatures_are_read_from_sources(path: str, names: str | None, tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "module.py").write_text(MODULE, encoding="utf-8")
    assert parameter_names(tmp_path, path) == names
