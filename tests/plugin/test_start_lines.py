"""The lines that start the fleet of a plan are taken by the parsers of what they start."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from pla_sglang.common import cli
from pla_sglang.launch_router import read_config
from pla_sglang.plugin.config import PlaConfig, add_cli_args, check_texts
from pla_sglang.plugin.start_checks import check_flags
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.forms import OURS, STOCK_FORMS, parse_form
from pla_sglang.sim.planning.result import FleetRow
from pla_sglang.sim.planning.start_lines import list_start_lines

BASE = Experiment(policy="round-robin", slo=Slo(3.0, 0.1))


def row_of(name: str, instances: int | None = 5, prefills: int | None = None, gpus: int = 1) -> FleetRow:
    figures = {"policy": "", "engine": "", "profile": "", "chunk_tokens": 0, "mixed": False, "stock": False}
    return FleetRow(name, **figures, gpus_per_instance=gpus, instances=instances, prefills=prefills)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*OURS, *STOCK_FORMS, "pla/split/temporal", "minimal-load/hrrn"])
def test_lines_are_taken_by_servers_and_router(name: str) -> None:
    form = parse_form(name, BASE)
    *servers, router = list_start_lines(form, row_of(name, prefills=2 if form.split else None))
    for line in servers:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["python", "-m"]
        assert words[2] == ("sglang.launch_server" if form.stock else "pla_sglang.launch_server")
        check_flags(words[3:])
        parser = cli.Parser(add_help=False)
        add_cli_args(parser)
        check_texts(cli.read_settings(parser.parse_known_args(words[3:])[0], PlaConfig).given)
    assert [int(line.rpartition("# ")[2].split()[0]) for line in servers] == ([2, 3] if form.split else [5])
    words = shlex.split(router.replace("HOST:PORT ...", "h:1"))
    control = read_config(words[3:])[0].control
    assert (control.policy, Slo(control.slo_ttft_s, control.slo_tpot_s)) == (form.experiment.policy, BASE.slo)
    assert control.migrates == form.experiment.policy.startswith("combined")


def test_flags_of_an_engine_are_those_of_the_experiment() -> None:
    form = parse_form("combined/temporal/mixed/decide/4096", dataclasses.replace(BASE, slots=64))
    server, _ = list_start_lines(form, row_of(form.name, gpus=2))
    for flag in (
        "--tp-size 2",
        "--prefill-disagg temporal",
        "--pla-deadlines decide",
        "--enable-mixed-chunk",
        "--chunked-prefill-size 4096",
        "--max-running-requests 64",
    ):
        assert flag in server


@pytest.mark.parametrize(
    ("name", "instances", "changes"),
    [
        ("least-tokens", None, {}),  # no answer
        ("star", 3, {}),
        ("combined/temporal", 3, {"engine": "temporal", "engine_knobs": ("awd.wait_max_s=0",)}),
    ],
)
def test_what_cannot_be_started_as_it_was_simulated_has_none(
    name: str, instances: int | None, changes: dict[str, object]
) -> None:
    form = parse_form(name, dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]
    assert list_start_lines(form, row_of(name, instances)) == []
