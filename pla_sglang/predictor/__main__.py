"""``python -m pla_sglang.predictor collect | train | evaluate``: STAR's learned predictor of what is left of an answer.

    predictor collect --model-path MODEL --data prompts.jsonl --out ROWS     hidden states of running requests
    predictor train --data ROWS --out FILE                                   a predictor, with its errors
    predictor evaluate --predictor FILE --data ROWS                          its errors beside those of others

What ``collect`` does not know goes to SGLang. Requests are split by their ids: 70 % to learn from, 15 % to stop by,
15 % for the figures. Where stdout is no terminal, or with --json, the last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pla_sglang.common import cli, terminal
from pla_sglang.common.checks import check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.predictor.collect import CollectConfig, collect
from pla_sglang.predictor.evaluate import ARMS, Figures, evaluate, key_of
from pla_sglang.predictor.model import (
    PredictorError,
    PredictorFacts,
    check_fits,
    load_predictor,
    not_a_predictor,
    save_predictor,
)
from pla_sglang.predictor.rows import Rows, read_rows
from pla_sglang.predictor.train import Epoch, TrainKnobs, choose_device, train_on_rest, whole_rows

TITLES = ("learned", "constant", "prompt only", "survival")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What is learned from, and how."""

    data: Path = knob(flag="--data FOLDER", help="rows of collect", heading="data")
    out: Path = knob(flag="--out FILE", help="where the predictor goes")
    json: bool = knob(False, "--json", terminal.JSON_HELP)
    training: TrainKnobs = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Which predictor, and on which data. Splits and training are as its file says."""

    predictor: Path = knob(flag="--predictor FILE", help="of train")
    data: Path = knob(flag="--data FOLDER", help="rows of collect; those that it was not trained on count")
    device: str = knob("auto", "--device NAME", "of torch; auto: the GPU where there is one")
    json: bool = knob(False, "--json", terminal.JSON_HELP)

    def __post_init__(self) -> None:
        check_fields(self)


def run_train(config: TrainConfig) -> Figures:
    """Raises ConfigError."""
    terminal.require_file_path("--out", config.out)
    rows, knobs = read_rows(config.data), config.training
    choose_device(knobs.device)
    whole = whole_rows(rows)
    print(describe(rows), flush=True)
    mlp = train_on_rest(whole, knobs, functools.partial(show_epoch, "learned"))
    figures = evaluate(mlp, rows, knobs, functools.partial(show_epoch, "prompt only"))
    data = {
        "folder": config.data.name,
        "requests": len(rows.rids),
        "cut_requests": len(rows.rids) - len(whole.rids),
        "rows": len(whole),
        "training": dataclasses.asdict(knobs),
    }
    save_predictor(config.out, mlp, PredictorFacts(**dataclasses.asdict(rows.origin), data=data, figures=figures))
    show_figures(figures)
    print(f"wrote {config.out}")
    return figures


def run_evaluate(config: EvaluateConfig) -> Figures:
    """Raises ConfigError."""
    mlp, facts = load_predictor(config.predictor)
    rows = read_rows(config.data)
    origin = rows.origin
    if reasons := check_fits(facts, model_name=origin.model, hidden_size=origin.hidden_size, dtype=origin.dtype):
        raise PredictorError(f"{config.predictor} does not fit {config.data}: {'; '.join(reasons)}")
    try:
        training = dict(facts.data["training"]) | {"device": config.device, "widths": mlp.widths}
        knobs = TrainKnobs(**training)
    except (KeyError, TypeError, ValueError):
        raise not_a_predictor(config.predictor, "it does not say how it was trained") from None
    print(describe(rows), flush=True)
    figures = evaluate(mlp, rows, knobs, functools.partial(show_epoch, "prompt only"))
    show_figures(figures)
    return figures


def describe(rows: Rows) -> str:
    cut = len(rows.rids) - int(rows.whole.sum())
    left_out = f"; {cut} were cut by their limit, so their rest is unknown: left out" if cut else ""
    return f"{len(rows.rids)} requests of {rows.origin.model}, {len(rows)} rows{left_out}"


def show_epoch(what: str, epoch: Epoch) -> None:
    errors = f"training {epoch.train_mae:.1f}, validation {epoch.validation_mae:.1f} tokens"
    print(f"{what}, epoch {epoch.number}: mean absolute error {errors}{', the best' * epoch.best}", flush=True)


def show_figures(figures: Figures) -> None:
    """A table of errors: all rows, then by tokens generated, then by length of the answer."""
    print(f"\nmean absolute error, tokens{'':13}" + "".join(f"{title:>12}" for title in (*TITLES, "rows")))
    print(row_of("all", figures))
    for key, what in (("mae_by_generated", "generated"), ("mae_by_length", "answers of")):
        for bucket in figures[key]:
            print(row_of(f"{what} {bucket['from_tokens']} to {bucket['below_tokens'] - 1}", bucket))


def row_of(name: str, figures: Figures) -> str:
    return f"{name:40}" + "".join(f"{figures[key_of(arm)]:12.1f}" for arm in ARMS) + f"{figures['rows']:12}"


class Subcommand(NamedTuple):
    """``rest_flag``: of ``cli.parse``."""

    config: type
    run: Callable[[Any], dict[str, Any]]
    rest_flag: str = ""


COMMANDS = {
    "collect": Subcommand(CollectConfig, collect, "engine-args"),
    "train": Subcommand(TrainConfig, run_train),
    "evaluate": Subcommand(EvaluateConfig, run_evaluate),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a bad value or data that cannot be learned from, 130 after Ctrl-C."""
    return terminal.run_to_end("predictor", functools.partial(run_command, argv))


def run_command(argv: Sequence[str] | None) -> int:
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if name not in COMMANDS:
            raise ConfigError(f"command {name!r} is not known; allowed: {', '.join(COMMANDS)}")
        command = COMMANDS[name]
        parser = cli.make_parser(command.config, f"predictor {name}", __doc__)
        config: Any = cli.parse(parser, arguments, command.config, rest_flag=command.rest_flag).config
        terminal.output.as_json = config.json
        terminal.print_result(command.run(config))
    except ConfigError as error:
        return cli.report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
