"""Whole fleets in the simulator: which policy, which forecast, at what cost.

python -m bench fleets policies       every policy on every named workload
python -m bench fleets forecast       forecasters by GPU-hours at equal attainment
python -m bench fleets steadiness     flips under constant load
python -m bench fleets publish DIR    results in DIR into the lab's page, and to bench/lab/results/simulated
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from types import ModuleType

from bench.harness.bench import ROOT
from bench.harness.publish import fill_page
from bench.harness.report import markdown
from bench.lab.fleets import forecast, policies, steadiness

COMMANDS: dict[str, ModuleType] = {"policies": policies, "forecast": forecast, "steadiness": steadiness}
RESULTS = ROOT / "bench" / "lab" / "results" / "simulated"


def page_texts(folder: Path) -> dict[str, str]:
    """Marker -> table, of the results of these benches in ``folder``; a table whose field no row has is left out."""
    texts = {}
    for name, module in COMMANDS.items():
        path = folder / f"fleets_{name}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        for marker, (field, table) in module.PAGES.items():
            if any(field in row for row in rows):
                texts[marker] = markdown(*table(rows), right=True)
    return texts


def publish(options: argparse.Namespace) -> int:
    """Results and pictures are copied too, so that every figure on the page can be looked up."""
    for marker, text in page_texts(options.folder).items():
        fill_page(marker, text)
        print(f"{marker}: from {options.folder}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in [*options.folder.glob("fleets_*.json"), *options.folder.glob("fleets_*.png")]:
        if path.parent.resolve() != RESULTS:
            shutil.copy(path, RESULTS / path.name)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    for name, module in COMMANDS.items():
        description = (module.__doc__ or "").split("\n\n")[0]
        module.add_arguments(commands.add_parser(name, description=description, help=description.split(": ", 1)[1]))
    pages = commands.add_parser("publish", help="the tables of bench/lab/docs/fleets.md from results")
    pages.add_argument("folder", nargs="?", type=Path, default=Path("bench_out"), help="with results of these benches")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, NoStepError."""
    if options.command == "publish":
        return publish(options)
    status: int = COMMANDS[options.command].run(options)
    return status
