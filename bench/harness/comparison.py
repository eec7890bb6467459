"""A comparison of whole servers, arm against arm: its flags, its starts, its result, tables and picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.harness import stats
from bench.harness.arms import (
    ARM_NAMES,
    OUR_PRESETS,
    OURS,
    STOCK,
    STOCK_PRESETS,
    Arm,
    build_arms,
    shared_flags,
    startable,
)
from bench.harness.bench import Result, is_complete
from bench.harness.cli import add_output, add_quick
from bench.harness.figures import arm_colours, draw_ecdf, format_seconds, log_seconds, panels
from bench.harness.fleet import Fleet, Solo
from bench.harness.latency import Spread, spread
from bench.harness.load_client import Run
from bench.harness.report import conditions, emit, environment, markdown, print_lines, say, show, spread_text, stdout
from bench.harness.stats import KINDS, Identity, Runs, as_json
from bench.harness.workload import Vocabulary
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.demo import demo_model_path

HEADLINE = ("short_ttft_p99_gain", "short_ttft_p50_ratio", "long_ttft_p90_ratio", "throughput_ratio")
T = TypeVar("T")


# -- flags ------------------------------------------------------------------------------------------------------------


def add_comparison(
    parser: argparse.ArgumentParser,
    *,
    rounds: int,
    arms: str = f"{STOCK},{OURS}",
    starts: int | None = None,
    emulated: bool = False,
) -> None:
    """``starts``: default of ``--starts``, for a bench that has it; ``emulated``: it has ``--device emulated``."""
    devices = ("auto", "cpu", "cuda", *(["emulated"] if emulated else []))
    run = parser.add_argument_group("run")
    run.add_argument("--rounds", type=int, default=rounds, help="times every arm gets the workload")
    if starts is not None:
        run.add_argument("--starts", type=int, default=starts, help="of all servers, each with --rounds of its own")
    add_output(parser)
    add_quick(parser)
    compared = parser.add_argument_group("arms")
    compared.add_argument("--arms", help=f"comma-separated, from: {', '.join(ARM_NAMES)} (default: {arms})")
    compared.add_argument("--ablation", action="store_true", help="add the arms that have single parts switched off")
    compared.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON:FLAGS",
        help="one more stock server, on another Python environment with flags of its own; may be repeated",
    )
    compared.add_argument("--our-flags", default="", metavar="FLAGS", help="further flags for our arms (not 'off')")
    server = parser.add_argument_group("servers")
    server.add_argument("--model-path", type=Path, help="model of every arm; default: the embedded demo model")
    server.add_argument("--device", choices=devices, default="auto", help="auto: cuda if there is an NVIDIA driver")
    server.add_argument("--server-flags", default="", metavar="FLAGS", help="further flags for every arm")
    server.add_argument("--kv-tokens", type=int, help="KV pool of every arm; default: fits the workload on a CPU")
    parser.set_defaults(default_arms=arms, **({"starts": 1} if starts is None else {}))


def prepare_comparison(args: argparse.Namespace) -> None:
    """Resolve 'auto' and defaults, read the model's vocabulary. Raises ConfigError for what cannot work."""
    for name in ("rounds", "starts"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} is out of range; allowed: at least 1")
    if args.quick:
        args.rounds = min(args.rounds, 2)
    if args.device == "auto":
        args.device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    args.model_name = "demo model" if args.model_path is None else args.model_path.name
    args.model_path = args.model_path or demo_model_path()
    if not (args.model_path / "config.json").is_file():
        raise ConfigError(f"--model-path {args.model_path} holds no config.json; give a folder with a model")
    args.vocabulary = Vocabulary.of_model(args.model_path)


def arms_of(args: argparse.Namespace, tuned_chunk_tokens: int | None = None) -> list[Arm]:
    """Those of ``--arms``; else the default ones, as far as the installed SGLang has them, those of stock's presets not
    beside an ablation: so many servers are too many. Raises ArmError.
    """
    default = [name for name in args.default_arms.split(",") if not (args.ablation and name in STOCK_PRESETS)]
    named = args.arms.split(",") if args.arms else startable(default)
    return build_arms(
        [name for name in named if name],
        args.peer,
        device=args.device,
        our_flags=shlex.split(args.our_flags),
        ablation=args.ablation,
        tuned_chunk_tokens=tuned_chunk_tokens,
    )


# -- running and showing one ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Of one start of all servers, or of several together: lone requests and rounds by arm, the servers at the end."""

    solo: Mapping[str, Solo]
    runs: Runs
    state: Mapping[str, Any]

    @classmethod
    def together(cls, starts: Sequence[Measured]) -> Measured:
        """All rounds; medians over the starts of what was measured once a start."""
        arms = [arm for arm in starts[0].runs if all(arm in start.runs for start in starts)]
        return cls(
            solo={arm: Solo.together([start.solo[arm] for start in starts]) for arm in arms},
            runs={arm: [run for start in starts for run in start.runs[arm]] for arm in arms},
            state=starts[-1].state,
        )

    def headline_ratios(self) -> dict[str, dict[str, float]]:
        """Against stock by arm: the medians that stand at the top of a result, as far as there are any."""
        by_arm = ratios_to_stock(self.runs).items()
        return {arm: {key: round(of[key].median, 4) for key in HEADLINE if key in of} for arm, of in by_arm}


class Comparison:
    """What every bench of whole servers does before and after its own measuring.

    Args:
        name: of the result and its files; logs lie in a folder of that name.
        args: the flags of ``add_comparison``, resolved.
        kv_tokens: the bench's own choice for a CPU; a GPU decides by its memory unless the user names a size.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        *,
        chunk_tokens: int,
        kv_tokens: int,
        tuned_chunk_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.args = args
        self.arms = arms_of(args, tuned_chunk_tokens)
        self._flags = shared_flags(
            model_path=args.model_path,
            device=args.device,
            chunk_tokens=chunk_tokens,
            kv_tokens=args.kv_tokens or (kv_tokens if args.device == "cpu" else None),
            extra=shlex.split(args.server_flags),
        )

    def fleet(self) -> Fleet:
        return Fleet(self.arms, self._flags, device=self.args.device, log_dir=self.args.out / self.name)

    def measure_starts(self, measure: Callable[[Fleet, int], Awaitable[T]]) -> list[T]:
        """``measure`` on each start of all servers; an interruption ends it after the start that it met.

        Two processes of the same program differ by a few per cent in speed: their memory lies differently, and each
        learns its own step times.
        """

        async def measure_each() -> list[T]:
            starts = []
            for start in range(self.args.starts):
                if self.args.starts > 1:
                    say(f"start {start + 1} of {self.args.starts}")
                async with self.fleet() as fleet:
                    starts.append(await measure(fleet, start))
                if not is_complete():
                    break
            return starts

        return asyncio.run(measure_each())

    @property
    def rounds(self) -> int:
        """Of all starts."""
        return int(self.args.rounds * self.args.starts)

    def make_result(self, workload: Mapping[str, Any], measured: Measured) -> dict[str, Any]:
        """Top level: the figures of ``headline_arm`` as medians of paired ratios. Below: everything, per arm."""
        runs = measured.runs
        arm = headline_arm(runs)
        identities = identity_to_first(runs, measured.solo)
        invalid = stats.problems(runs)
        return {
            "bench": self.name,
            **dict.fromkeys(HEADLINE),
            **measured.headline_ratios().get(arm or "", {}),
            "outputs_identical": all_identical(identities),
            "rounds": self.rounds if is_complete() else max(map(len, runs.values())),
            "seed": self.args.seed,
            "workload": dict(workload),
            "valid": not invalid,
            "problems": invalid,
            "warnings": stats.warnings(runs),
            "figures_of": arm,
            "outputs_by_arm": {arm: identity.as_json() for arm, identity in identities.items()},
            "outputs_distinct": len({answer for of_arm in runs.values() for answer in stats.answers(of_arm).values()}),
            "ratios": {
                arm: {key: as_json(value) for key, value in of.items()} for arm, of in ratios_to_stock(runs).items()
            },
            **best_stock(runs),
            "figures": {arm: stats.arm_figures(of_arm) for arm, of_arm in runs.items()},
            **measured.state,
            "device": self.args.device,
            "model": self.args.model_name,
            "server_flags": self.args.server_flags,
            "idle_arms": "frozen (SIGSTOP) while another arm is measured",
            **environment(),
        }

    @staticmethod
    def show_tables(title: str, result: Result) -> None:
        """TTFT per class and arm, medians over rounds with their range; then every arm against stock."""
        by_arm = result["figures"].items()
        latencies = []
        for kind in KINDS:
            for arm, of_arm in by_arm:
                if f"{kind}_ttft_s" in of_arm:
                    spreads = [of_arm[f"{kind}_ttft_s"][name] for name in ("p50", "p90", "p99", "max")]
                    latencies.append([kind, arm, *map(spread_text, [*spreads, of_arm[f"{kind}_e2e_s"]["p50"]])])
        header = ("class", "arm", "TTFT p50", "p90", "p99", "worst", "last token p50")
        show(title, header, latencies, caption="median over rounds (lowest .. highest round), s")
        rows = []
        for arm, of_arm in by_arm:
            tpots_s = [of_arm.get(f"{kind}_tpot_s", {}).get("median") for kind in KINDS]
            to_stock = [spread_text(result["ratios"].get(arm, {}).get(key), "x") for key in HEADLINE]
            rows.append([arm, *tpots_s, round(of_arm["tokens_per_s"]["median"]), *to_stock, of_arm["failed"]])
        speeds = ("arm", "short TPOT s", "long TPOT s", "tokens/s")
        ratios = ("short p99 gain", "short p50 ratio", "long p90 ratio", "throughput")
        show("against stock, paired by round", (*speeds, *ratios, "failed"), rows)

    def keep(self, result: Result, runs: Runs, *, title: str, solo_s: Mapping[str, float] | None = None) -> int:
        """Shows the verdict; writes picture, requests and result under the bench's name. Returns its exit status.

        ``solo_s``: TTFT of a lone request by class, for the picture.
        """
        print_verdict(result)
        out = self.args.out
        plot_comparison(runs, out / f"{self.name}.png", title=title, solo_s=solo_s or {})
        say(f"picture: {out / f'{self.name}.png'}")
        write_requests(runs, out / f"{self.name}.requests.jsonl")
        emit(result, self.name, out)
        return 0 if result["valid"] else 1


def ratios_to_stock(runs: Runs) -> dict[str, dict[str, Spread]]:
    """Of every other arm, paired by round. Empty without a stock arm."""
    if STOCK not in runs:
        return {}
    return {arm: stats.ratios(runs[STOCK], of_arm) for arm, of_arm in runs.items() if arm != STOCK}


def best_stock(runs: Runs) -> dict[str, Any]:
    """The arm of stock with the least p99 of shorts, and ours against it, paired by round; ``vs_best_stock`` is empty
    where ours did not run. Nothing where stock ran with its defaults only: then it is all there is.
    """
    p99_s = {
        arm: spread(of_rounds).median
        for arm, of_arm in runs.items()
        if arm in (STOCK, *STOCK_PRESETS) and (of_rounds := stats.per_round(of_arm, "short", "p99"))
    }
    if not STOCK_PRESETS.keys() & p99_s.keys():
        return {}
    best = min(p99_s, key=p99_s.__getitem__)
    against = stats.ratios(runs[best], runs[OURS]) if OURS in runs else {}
    return {"best_stock": best, "vs_best_stock": {key: as_json(value) for key, value in against.items()}}


def headline_arm(arms: Iterable[str]) -> str | None:
    """The arm that the top-level figures are about: ours, else the first that is not stock, else None."""
    names = list(arms)
    if OURS in names:
        return OURS
    presets = [arm for arm in names if arm in OUR_PRESETS]
    others = [arm for arm in names if arm != STOCK]
    return next(iter(presets or others), None)


def identity_to_first(runs: Runs, solo: Mapping[str, Solo]) -> dict[str, Identity]:
    """Every arm against the first one. Solo answers count too: they ran in no batch with anybody."""
    alone = {arm: [Run(of_arm.outcomes, 0.0)] for arm, of_arm in solo.items()}
    whole = {arm: [*of_arm, *alone.get(arm, [])] for arm, of_arm in runs.items()}
    first, *others = whole
    return {arm: stats.compare_outputs(whole[first], whole[arm]) for arm in others}


def all_identical(identities: Mapping[str, Identity]) -> bool | None:
    """Over our arms. A peer with another torch may round another way; it counts only where there is no arm of ours."""
    ours = [identity for arm, identity in identities.items() if arm in OUR_PRESETS] or list(identities.values())
    known = [identity.identical for identity in ours if identity.identical is not None]
    return all(known) if known else None


# -- tables -----------------------------------------------------------------------------------------------------------


def print_verdict(result: Result) -> None:
    """Identity and validity, in words, under the tables."""
    first, distinct = next(iter(result["figures"])), result["outputs_distinct"]
    for arm, identity in result["outputs_by_arm"].items():
        of = f"{identity['compared']} prompts, {distinct} distinct answers"  # few distinct ones: a weak check
        text = f"outputs of {arm}: nothing to compare"
        if identity["identical"]:
            text = f"outputs of {arm}: token-identical to {first}, {of}"
        elif identity["identical"] is not None:
            some = ", ".join(identity["different_rids"])
            text = f"OUTPUTS of {arm} DIFFER from {first} in {identity['different']} of {of}: {some}"
        stdout.print(text, markup=False)
    print_lines("INVALID", result["problems"])
    print_lines("WARNING", result["warnings"])
    cached = {arm: figures["cached_tokens"] for arm, figures in result["figures"].items()}
    if len(set(cached.values())) > 1:
        stdout.print(f"note: the arms took different numbers of tokens from their prefix caches: {cached}")


def arms_page(result: Result) -> str:
    """One row an arm: for ablations, peers and chat."""
    header = ["arm", "short TTFT p50", "short TTFT p99", "long TTFT p90", "tokens/s over stock's"]
    rows = []
    for arm, figures in result["figures"].items():
        ratio = result["ratios"].get(arm, {})
        cells = [spread_text(figures["short_ttft_s"][part], " s") for part in ("p50", "p99")]
        cells.append(spread_text(figures.get("long_ttft_s", {}).get("p90"), " s"))
        rows.append([arm, *cells, spread_text(ratio.get("throughput_ratio"), "x")])
    usual = ("stock", "ours")  # those of every bench
    named = [f"- `{arm}`: `{command}`" for arm, command in result["arms"].items() if arm not in usual]
    return "\n\n".join([markdown(header, rows), conditions(result), *(["\n".join(named)] if named else [])])


def write_requests(runs: Runs, path: Path) -> None:
    """Every request of every round, one JSON object a line, for those who want to look closer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "arm": arm,
            "round": number,
            "rid": outcome.request.rid,
            "kind": outcome.request.kind,
            "input_tokens": len(outcome.request.input_ids),
            "at_s": round(outcome.request.at_s, 4),
            "ttft_s": round(outcome.ttft_s, 4) if outcome.first_s is not None else None,
            "e2e_s": round(outcome.e2e_s, 4) if outcome.done_s is not None else None,
            **{name: getattr(outcome, name) for name in ("cached_tokens", "retractions", "error", "output_ids")},
        }
        for arm, of_arm in runs.items()
        for number, run in enumerate(of_arm, start=1)
        for outcome in run.outcomes
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def plot_comparison(runs: Runs, path: Path, *, title: str, solo_s: Mapping[str, float]) -> None:
    """One panel per class that occurs with the distribution over all rounds, and one with the p99 of every round."""
    samples = {kind: {arm: stats.ttfts_s(of_arm, kind) for arm, of_arm in runs.items()} for kind in KINDS}
    kinds = [kind for kind in KINDS if any(samples[kind].values())]
    count = len(kinds) + 1
    with panels(path, count, size=(4.6 * count, 4.4), title=title) as axes:
        for panel, kind in zip(axes, kinds, strict=False):
            draw_ecdf(panel, samples[kind], kind, solo_s=solo_s.get(kind))
        _draw_rounds(
            axes[-1], {arm: stats.per_round(of_arm, kinds[0], "p99") for arm, of_arm in runs.items()}, kinds[0]
        )
        handles, labels = axes[0].get_legend_handles_labels()
        legend = {"loc": "outside lower center", "ncols": min(8, len(labels)), "frameon": False, "fontsize": 9}
        axes[0].figure.legend(handles, labels, **legend)


def _draw_rounds(panel: Any, p99_s: Mapping[str, list[float]], kind: str) -> None:
    """Every round as a dot, its neighbours in time side by side, the median as a bar."""
    colours = arm_colours(list(p99_s))
    shown = [value for values in p99_s.values() for value in values]
    for column, (arm, values) in enumerate(p99_s.items()):
        if not values:
            continue
        offsets = [column + 0.24 * ((index + 0.5) / len(values) * 2 - 1) for index in range(len(values))]
        panel.scatter(offsets, values, s=34, color=colours[arm], alpha=0.85, zorder=3)
        middle = spread(values).median
        panel.hlines(middle, column - 0.34, column + 0.34, color=colours[arm], linewidth=2.5)
        above = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "va": "bottom", "fontsize": 9}
        panel.annotate(f"median {format_seconds(float(f'{middle:.3g}'))}", (column, max(values)), **above)
    low, high = min(shown) * 0.6, max(shown) * 1.6
    panel.set(
        yscale="log", ylim=(low, high), xlim=(-0.6, len(p99_s) - 0.4), title=f"p99 of {kind} prompts, every round"
    )
    log_seconds(panel.yaxis, low, high)
    panel.set_xticks(range(len(p99_s)), list(p99_s), rotation=20 if len(p99_s) > 3 else 0)
    panel.grid(alpha=0.3, axis="y")
