"""What users can type stands on a page, and constants on pages are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import make_flags
import pytest

from pla_sglang.common.checks import declared_fields
from pla_sglang.common.cli import flags_of
from pla_sglang.policy.common.step_model import CPU_START, GPU_START, StepModel
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.registry import POLICIES, live_policy_names, policy_names

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"in_place": "combined", "unite": "combined", "cost": "combined", "eviction": "combined", "predictor": "arrow"}


def names_in_first_column(page: Path, heading: str) -> list[str]:
    """Names in backticks in the first cells of the table that begins with ``heading``."""
    text = page.read_text(encoding="utf-8")
    rows = text.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_each_policy_has_its_row() -> None:
    assert sorted(names_in_first_column(DOCS / "reference" / "policies" / "fleet.md", "name")) == sorted(policy_names())


def test_the_page_of_the_router_names_just_the_live_policies() -> None:
    text = (DOCS / "reference" / "control.md").read_text(encoding="utf-8")
    listed = text.partition("\n## Policies\n")[2].partition(";")[0]
    assert re.findall(r"`([a-z-]+)`", listed) == live_policy_names()


def test_each_policy_knob_stands_on_the_page_of_its_part() -> None:
    knobs = {(part, one) for policy in POLICIES.values() for part, of_part in policy.knobs.items() for one in of_part}
    for part, config in knobs:
        page = DOCS / "reference" / "policies" / f"{PAGES.get(part, part)}.md"
        rows = [line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
        named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
        assert {declared.field.name for declared in declared_fields(config)} <= named


def test_each_flag_has_its_row() -> None:
    page = DOCS / "reference" / "flags.md"
    assert page.read_text("utf-8") == make_flags.render(), "run: python scripts/make_flags.py docs/reference/flags.md"


@pytest.mark.parametrize("command", make_flags.COMMANDS)
def test_each_flag_has_a_text(command: str) -> None:
    config, _ = make_flags.COMMANDS[command]
    assert [declared.knob.name for declared in flags_of(config) if not declared.knob.help] == []


@pytest.mark.parametrize(("device", "model"), [("GPU", GPU_START), ("CPU", CPU_START)])
def test_start_values_of_the_boundary_are_those_of_the_code(device: str, model: StepModel) -> None:
    text = (DOCS / "reference" / "policies" / "boundary.md").read_text(encoding="utf-8")
    header = [cell.strip() for cell in re.findall(r"^\| \| g0 .*$", text, re.MULTILINE)[0].split("|")[2:-1]]
    row = re.findall(rf"^\| {device} .*$", text, re.MULTILINE)[0].split("|")[2:-1]
    values = dict(zip(header, (cell.strip() for cell in row), strict=True))
    *names, boundaries = header
    assert {name: float(values[name]) for name in names} == {name: getattr(model, f"{name}_s") for name in names}
    assert boundaries == "boundary at H = 0, 8,192, 32,768"
    tokens = [Boundary(model=model).tokens(history) for history in (0, 8_192, 32_768)]
    assert values[boundaries] == ", ".join(map(str, tokens))
