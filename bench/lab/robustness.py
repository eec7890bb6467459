"""What each tuned constant decides: halved and doubled, one at a time, the share in target of every named workload.

In the simulator, 8 instances in the default form: ``combined`` before temporal engines whose deadlines decide (``OURS``
of ``fleet_arms.py``). The rate is that of stock's best arm at 90 % in target, or one of ``RATES_PER_S``. The
constants are all numbers that ``--policy-knob`` and ``--engine-knob`` take, and ``--move-gain``. Of factors, which do
nothing at 1, what is above 1 is halved and doubled. A value that is not allowed is replaced by the nearest that is.

On many workloads whole parts of the form do nothing. So the constants of each of ``RESTING`` are first changed at once:
where all requests end at the same times as by default, none of them is measured alone. Every run is kept in ``--out``,
and a run of the same code resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import BenchError, Result, is_complete
from bench.harness.report import Cells, emit, environment, markdown, show
from bench.harness.steps import NoStepError, Row
from bench.lab import cells
from bench.lab.best_stock import FRONTIER
from bench.lab.cells import CellRunner, data_folder
from bench.lab.fleet_arms import INSTANCES, OURS, client_limit_tokens
from bench.lab.named_workloads import available, workload
from pla_sglang.common.checks import Declared, Range, declared_fields, knobs_of_parts, plain, require
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.temporal_knobs import OWN, PARTS
from pla_sglang.policy.combined.fleet import IN_PLACE_TOKENS
from pla_sglang.policy_packages import find_policy
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import Experiment, engine_policy_knobs, run_experiment
from pla_sglang.sim.workload import Trace

RATES_PER_S = {"azure_code_tight": 100.0, "mooncake_70b": 4.5, "azure_conv_eager": 45.0, "agentic": 1.0}
SPANS_S = {
    "azure_code": 60.0,
    "azure_conv": 60.0,
    "azure_code_tight": 60.0,
    "azure_conv_eager": 60.0,
    "burst": 60.0,
    "hol": 100.0,
    "chat": 100.0,
    "mooncake": 200.0,
    "mooncake_70b": 200.0,
    "reason": 300.0,
    "star": 600.0,
    "agentic": 3000.0,
}
MOVE_GAIN = "move_gain"
RESTING = ("unite", "combined", "star", "arrow", "in_place", "dopd", "awd", "long_prompts", OWN)
FACTORS = (
    "unite.margin",
    "predictor.own_factor",
    "arrow.load_change",
    "slo.slower",
    "long_prompts.margin",
)
GIVEN = ("long_prompts.chunk_max_tokens", "long_prompts.grid_tokens", "awd.depth_max")  # by the engine: no choice
HALF, DOUBLE = TIMES = ("half", "double")
ATTAINMENT, FINISH_S = "attainment", "finish_s"
SAME, MUCH = 0.001, 0.95  # ratios within so much of 1 are none; below, a constant decides much
Changes = tuple[tuple[str, float], ...]  # values by constant


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant of the default form, and the values that it is given."""

    default: float
    half: float
    double: float

    @property
    def changes(self) -> bool:
        """False where there is nothing to halve."""
        return not self.half == self.double == self.default


def find_constants() -> dict[str, Constant]:
    """By name, those of ``RESTING`` last: a run that is stopped has the others."""
    declared = {name: one for name, one in _declared().items() if name not in GIVEN}
    found = {
        name: _constant(name, declared[name]) for name in sorted(declared, key=lambda name: part_of(name) in RESTING)
    }
    return {name: constant for name, constant in found.items() if constant is not None and constant.changes}


def part_of(name: str) -> str:
    return name.partition(".")[0]


def _declared() -> dict[str, Declared]:
    moves = next(one for one in declared_fields(Experiment) if one.field.name == MOVE_GAIN)
    return {**knobs_of_parts(PARTS), **knobs_of_parts(find_policy(OURS.policy).knobs), MOVE_GAIN: moves}


def _constant(name: str, declared: Declared) -> Constant | None:
    default = _default_of(name, declared)
    if default is None or isinstance(default, bool) or declared.base not in (int, float):
        return None
    neutral = 1.0 if name in FACTORS else 0.0
    allowed = declared.knob.allowed if isinstance(declared.knob.allowed, Range) else Range()

    def value_at(times: float) -> float:
        value = min(max(neutral + times * (default - neutral), allowed.low), allowed.high)
        return math.floor(value + 0.5) if declared.base is int else value

    return Constant(default, value_at(0.5), value_at(2.0))


def _default_of(name: str, declared: Declared) -> Any:
    """What the default form has, which need not be what the field has."""
    part, _, field = name.rpartition(".")
    if part in PARTS:
        engine = engine_policy_knobs(EngineKnobs(chunk_tokens=OURS.chunk_tokens), decide=OURS.deadlines == "decide")
        return getattr(engine if part == OWN else getattr(engine, part), field)
    return IN_PLACE_TOKENS if name == "dopd.local_max_tokens" else declared.field.default


def change(experiment: Experiment, changes: Changes) -> Experiment:
    """With these values. Raises ConfigError for those that do not fit together."""
    texts: dict[bool, tuple[str, ...]] = {True: (), False: ()}  # by whether it is the engine's
    for name, value in changes:
        if name == MOVE_GAIN:
            experiment = dataclasses.replace(experiment, move_gain=value)
        else:
            texts[part_of(name) in PARTS] += (f"{name}={plain(value)}",)
    return dataclasses.replace(experiment, engine_knobs=texts[True], policy_knobs=texts[False])


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a workload is offered."""

    workload: str
    rate_per_s: float
    span_s: float
    folder: Path | None

    def trace(self) -> Trace:
        return _trace(self)


@functools.lru_cache(maxsize=16)
def _trace(setting: Setting) -> Trace:
    return workload(setting.workload, setting.folder).trace_at(setting.rate_per_s, setting.span_s)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run."""

    setting: Setting
    changes: Changes = ()

    @property
    def key(self) -> str:
        changes = ",".join(f"{name}={plain(value)}" for name, value in self.changes) or "default"
        return f"{self.setting.workload}/{self.setting.rate_per_s:g} per s/{self.setting.span_s:g} s/{changes}"


def measure_cell(cell: Cell) -> Row:
    """The share in target, and the sum of all times at which requests ended. A form that leaves some for ever has 0."""
    load = workload(cell.setting.workload, cell.setting.folder)
    experiment = OURS.experiment(load.slo, load.profile, limit_tokens=client_limit_tokens(load.trace))
    try:
        run = run_experiment(change(experiment, cell.changes), cell.setting.trace())
    except SimError as error:
        return {ATTAINMENT: 0.0, FINISH_S: None, "error": str(error)}
    return {ATTAINMENT: run.figures.attainment, FINISH_S: float(run.result.served.finish_s.sum())}


@dataclasses.dataclass(frozen=True)
class Measuring:
    """Measures changes of ``constants`` on ``settings``."""

    runner: CellRunner
    settings: Sequence[Setting]
    constants: Mapping[str, Constant]

    def run(self) -> tuple[dict[str, float], dict[str, dict[str, dict[str, float]]]]:
        """Shares in target: by workload as it is, and by constant, ``TIMES`` and workload as far as they are complete.

        Raises NoStepError where it was interrupted before there was one constant.
        """
        default = self._measure(Cell(setting) for setting in self.settings)
        groups = self._measure(
            Cell(setting, changes)
            for part, times, setting in itertools.product(RESTING, TIMES, self.settings)
            if (changes := self._changes_of_part(part, times))
        )
        alone = self._measure(
            cell
            for name, times, setting in itertools.product(self.constants, TIMES, self.settings)
            if (cell := self._cell_of(name, times, setting, default, groups)).changes
        )
        rows = {**default, **alone}
        changed: dict[str, dict[str, dict[str, float]]] = {}
        for name in self.constants:
            of_times = {
                times: [rows.get(self._cell_of(name, times, one, default, groups)) for one in self.settings]
                for times in TIMES
            }
            if all(None not in found for found in of_times.values()):
                changed[name] = {
                    times: {one.workload: row[ATTAINMENT] for one, row in zip(self.settings, found, strict=True) if row}
                    for times, found in of_times.items()
                }
        if not changed:
            raise NoStepError("no constant is measured on all workloads yet; what was measured is kept")
        return {setting.workload: default[Cell(setting)][ATTAINMENT] for setting in self.settings}, changed

    def _measure(self, wanted: Iterable[Cell]) -> dict[Cell, Row]:
        """Without some of them where the measuring was, or had been, interrupted."""
        named = {cell.key: cell for cell in wanted}
        if not named or not is_complete():
            return {}
        rows = self.runner.run(named, measure_cell)
        return {named[key]: row for key, row in rows.items()}

    def _changes_of_part(self, part: str, times: str) -> Changes:
        """Of all constants of the part; none where it has a single one."""
        names = [name for name in self.constants if part_of(name) == part]
        return tuple((name, getattr(self.constants[name], times)) for name in names) if len(names) > 1 else ()

    def _cell_of(
        self, name: str, times: str, setting: Setting, default: Mapping[Cell, Row], groups: Mapping[Cell, Row]
    ) -> Cell:
        """That tells what a constant does on a workload: the default's where its whole part does nothing there."""
        group = groups.get(Cell(setting, self._changes_of_part(part_of(name), times)))
        value = getattr(self.constants[name], times)
        rests = value == self.constants[name].default or (group is not None and group == default.get(Cell(setting)))
        return Cell(setting) if rests else Cell(setting, ((name, value),))


def figures_of(
    attainment: Mapping[str, float], changed: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> dict[str, Any]:
    """Of each constant, ratios of shares in target, changed over default; and which of them are none, and small."""
    figures: dict[str, Any] = {}
    for name, of_times in changed.items():
        ratios = {times: {one: of_times[times][one] / attainment[one] for one in attainment} for times in TIMES}
        worst, worst_workload = min((value, one) for of_one in ratios.values() for one, value in of_one.items())
        every = [value for of_one in ratios.values() for value in of_one.values()]
        figures[name] = {
            **{f"geomean_{times}": math.prod(ratios[times].values()) ** (1 / len(attainment)) for times in TIMES},
            "worst": worst,
            "worst_workload": worst_workload,
            "best": max(every),
            "below": sorted({one for of_one in ratios.values() for one, value in of_one.items() if value < MUCH}),
        }
    return {
        "figures": figures,
        "moves_nothing": [
            name for name, of_one in figures.items() if of_one["worst"] >= 1 - SAME and of_one["best"] <= 1 + SAME
        ],
        "moves_much": [name for name, of_one in figures.items() if of_one["below"]],
    }


def figures_again(result: Result) -> dict[str, Any]:
    return figures_of(result["attainment"], result["changed"])


def table(result: Result) -> Cells:
    """A row for each constant that moves something, the one that decides most first."""
    header = ["constant", "default", "halved", "doubled", "halved: all", "doubled: all", "worst", "on", "best"]
    shown = {name: of_one for name, of_one in result["figures"].items() if name not in result["moves_nothing"]}
    rows = []
    for name, of_one in sorted(shown.items(), key=lambda pair: pair[1]["worst"]):
        values = [f"{result['constants'][name][key]:g}" for key in ("default", *TIMES)]
        ratios = [f"{of_one[f'geomean_{times}']:.3f}" for times in TIMES]
        rows.append(
            [f"`{name}`", *values, *ratios, f"{of_one['worst']:.3f}", of_one["worst_workload"], f"{of_one['best']:.3f}"]
        )
    return header, rows


def page(result: Result) -> str:
    settings = ", ".join(
        f"{name} {of_one['rate_per_s']:.3g}/s for {of_one['span_s']:g} s ({of_one['attainment']:.3f} in target)"
        for name, of_one in result["settings"].items()
    )
    nothing = ", ".join(f"`{name}`" for name in result["moves_nothing"]) or "none"
    return "\n\n".join(
        [
            markdown(*table(result), right=(1, 2, 3, 4, 5, 6, 8)),
            f"Every ratio within {SAME:g} of 1: {nothing}.",
            f"Workloads: {settings}. Commit {result['environment']['plugin_commit']}.",
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--workloads", help="names with commas between; default: all that can be had")
    parser.add_argument("--constants", help="names or parts, such as slo, with commas between; default: all")
    parser.add_argument("--span-times", type=float, default=1.0, help="factor on the spans of all workloads")


def choose_constants(text: str | None) -> dict[str, Constant]:
    """Raises ConfigError for a name that is neither a constant nor a part."""
    known = find_constants()
    if text is None:
        return known
    for name in text.split(","):
        if not any(name in (one, part_of(one)) for one in known):
            raise ConfigError(f"--constants {name!r} is not known; allowed: {', '.join(known)}")
    wanted = text.split(",")
    return {name: one for name, one in known.items() if name in wanted or part_of(name) in wanted}


def make_settings(names: Sequence[str], folder: Path | None, span_times: float) -> list[Setting]:
    """Raises ConfigError for a workload that is not known."""
    rates = json.loads(FRONTIER.read_text(encoding="utf-8"))["best_stock_rps"] | RATES_PER_S
    for name in names:
        if name not in SPANS_S:
            raise ConfigError(f"--workloads {name!r} is not known; allowed: {', '.join(SPANS_S)}")
    return [Setting(name, rates[name], span_times * SPANS_S[name], folder) for name in names]


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError, BenchError."""
    require("--span-times", options.span_times, 0, above=True)
    about, folder, constants = environment(), data_folder(options.data), choose_constants(options.constants)
    names = options.workloads.split(",") if options.workloads else available(folder, tuple(SPANS_S))
    settings = make_settings(names, folder, options.span_times)
    attainment, changed = Measuring(cells.make_runner(options, "robustness"), settings, constants).run()
    if lost := [name for name, share in attainment.items() if share == 0]:
        raise BenchError(f"nothing is in target on {', '.join(lost)}, so that no ratio can be stated")
    result: dict[str, Any] = {
        "bench": "robustness",
        **figures_of(attainment, changed),
        "constants": {name: dataclasses.asdict(constants[name]) for name in changed},
        "attainment": attainment,
        "changed": changed,
        "settings": {
            one.workload: {
                "rate_per_s": one.rate_per_s,
                "span_s": one.span_s,
                "requests": len(one.trace()),
                ATTAINMENT: attainment[one.workload],
            }
            for one in settings
        },
        "instances": INSTANCES,
        "environment": about,
    }
    show("share in target, changed over default", *table(result))
    show("constants that move nothing", ["constant"], [[name] for name in result["moves_nothing"]])
    emit(result, "robustness", options.out)
    return 0


PAGES = {"robustness": page}
