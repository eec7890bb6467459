"""Write the tables of README.md and docs/benchmarks.md from the JSON files that benches left behind.

    python -m bench.publish hol=bench_out/hol.json overload=bench_out/overload.json ...

NAME is a pair of markers in docs/benchmarks.md, ``<!-- results:NAME -->`` and ``<!-- /results:NAME -->``; what stands
between them is replaced. ``hol`` fills the headline of README.md as well. The JSON files are copied to
``bench/results/DEVICE/NAME.json``, pictures beside them too, so that every figure on a page can be looked up.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.lib import emulated_pages
from bench.lib.tables import markdown as table
from bench.routing import goals

Result = Mapping[str, Any]


def spread(value: Mapping[str, float], unit: str = "", digits: int = 3) -> str:
    """Median and range over rounds."""
    low, high = f"{value['low']:.{digits}g}", f"{value['high']:.{digits}g}"
    return f"{value['median']:.{digits}g}{unit} ({low} .. {high})"


def rounds_of(result: Result) -> str:
    count = result["rounds"]
    return f"{count} round" if count == 1 else f"{count} rounds"


def conditions(result: Result) -> str:
    return (
        f"{rounds_of(result)}, median (lowest .. highest) · {result['hardware']}, {result['device']} · "
        f"{result['model']} · SGLang {result['sglang_version']} · commit {result['plugin_commit']} · "
        f"seed {result['seed']} · greedy outputs token-identical: {str(result['outputs_identical']).lower()}"
    )


def headline(result: Result) -> str:
    stock, ours, ratio = result["figures"]["stock"], result["figures"]["ours"], result["ratios"]["ours"]
    work = result["workload"]
    rows = [
        ["short prompts, TTFT p99", *_both(stock, ours, "short_ttft_s", "p99")],
        ["short prompts, TTFT p50", *_both(stock, ours, "short_ttft_s", "p50")],
        ["short prompts, last token p50", *_both(stock, ours, "short_e2e_s", "p50")],
        ["long prompts, TTFT p90", *_both(stock, ours, "long_ttft_s", "p90")],
        ["tokens/s", spread(stock["tokens_per_s"], digits=4), spread(ours["tokens_per_s"], digits=4)],
    ]
    gain = spread(ratio["short_ttft_p99_gain"], "x") + " lower"
    others = ("short_ttft_p50_ratio", None, "long_ttft_p90_ratio", "throughput_ratio")
    against = [gain, *("-" if key is None else spread(ratio[key], "x") for key in others)]
    what = f"longs {work['longs']}, shorts {work['shorts']}, chunk {work['chunk_tokens']}"
    body = [[*row, cell] for row, cell in zip(rows, against, strict=True)]
    shown = table([what, "stock SGLang", "pla_sglang", "ratio"], body)
    starts = result["workload"].get("starts", 1)
    command = f"make demo ARGS='--starts {starts} --rounds {result['rounds'] // starts}'" if starts > 1 else "make demo"
    return f"{shown}\n\n{conditions(result)} · command: `{command}`"


def _both(stock: Result, ours: Result, what: str, quantile: str) -> list[str]:
    return [spread(of_arm[what][quantile], " s") for of_arm in (stock, ours)]


def hol(result: Result) -> str:
    solo = result["solo"]["ours"]
    within = "within" if solo["short_ttft_p99_within_bound"] else "above"
    return headline(result) + (
        f"\n\nLone requests: short {solo['short_solo_ttft_s'] * 1e3:.0f} ms, "
        f"long {solo['long_solo_ttft_s'] * 1e3:.0f} ms. "
        f"Five solo values plus the longest chunk ({solo['long_chunk_s'] * 1e3:.0f} ms): "
        f"{solo['short_ttft_p99_bound_s'] * 1e3:.0f} ms; "
        f"p99 of shorts: {solo['short_ttft_p99_s'] * 1e3:.0f} ms, {within}." + starts(result)
    )


def starts(result: Result) -> str:
    """The headline figures start by start, where the servers were started more than once."""
    by_start = [of_start["ours"] for of_start in result.get("by_start", ())]
    if len(by_start) < 2:
        return ""
    rows = [
        [
            str(index),
            f"{figures['short_ttft_p99_gain']:.3g}x lower",
            f"{figures['short_ttft_p99_s'] * 1e3:.0f} ms of {figures['short_ttft_p99_bound_s'] * 1e3:.0f} ms",
            f"{figures['long_ttft_p90_ratio']:.3g}x",
            f"{figures['throughput_ratio']:.3g}x",
        ]
        for index, figures in enumerate(by_start, start=1)
    ]
    header = ["start of all servers", "short p99", "of its bound", "long p90", "tokens/s"]
    each = rounds_of({"rounds": result["rounds"] // len(by_start)})
    return f"\n\nStart by start, {each} each:\n\n{table(header, rows)}"


def arms(result: Result) -> str:
    """One row an arm: for ablations, peers and chat."""
    header = [
        "arm",
        "short TTFT p50",
        "short TTFT p99",
        "long TTFT p90",
        "short p99 gain",
        "long p90 ratio",
        "throughput",
    ]
    rows = []
    for arm, figures in result["figures"].items():
        ratio = result["ratios"].get(arm, {})
        cells = [arm, *(spread(figures["short_ttft_s"][part], " s") for part in ("p50", "p99"))]
        cells.append(spread(figures["long_ttft_s"]["p90"], " s") if "long_ttft_s" in figures else "-")
        keys = ("short_ttft_p99_gain", "long_ttft_p90_ratio", "throughput_ratio")
        rows.append([*cells, *(spread(ratio[key], "x") if key in ratio else "-" for key in keys)])
    named = "\n".join(f"- `{arm}`: `{command}`" for arm, command in result["arms"].items())
    return table(header, rows) + "\n\n" + conditions(result) + "\n\n" + named


def overload(result: Result) -> str:
    keys = list(result["long_ttft_s"])
    header = [
        "arm",
        *(f"worst long, {key} s" for key in keys),
        *(f"mean short, {key} s" for key in keys),
        "against stock",
    ]
    rows = []
    for arm, longs in result["long_ttft_s_by_arm"].items():
        shorts, ratio = result["short_ttft_mean_s_by_arm"][arm], result["short_ttft_mean_ratio_to_fcfs_by_arm"][arm]
        cells = ["no answer" if longs[key] is None else f"{longs[key]:.2f} s" for key in keys]
        cells += [f"{shorts[key]:.2f} s" for key in keys]
        rows.append([arm, *cells, ", ".join(f"{ratio[key]:.2f}x" for key in keys)])
    within = "within" if result["long_within_bound"] else "above"
    e2e = ", ".join(f"{arm} {spread(of['short_e2e_s']['p50'], ' s')}" for arm, of in result["figures"].items())
    return (
        f"TTFT by length of the stream. Stated bound of ours for a long: {result['bound_s']:.2f} s; {within}. "
        f"Shorts to their last token, median: {e2e}.\n\n" + table(header, rows) + "\n\n" + conditions(result)
    )


def kv_pressure(result: Result) -> str:
    header = ["arm", "worst short TTFT", "mean short", "mean long", "retractions", "failed"]
    rows = []
    for arm, of_arm in result["figures"].items():
        short, long = of_arm["short_ttft_s"], of_arm["long_ttft_s"]
        figures = [short["max"]["high"], short["mean"]["median"], long["mean"]["median"]]
        rows.append([arm, *(f"{value:.2f} s" for value in figures), str(of_arm["retractions"]), str(of_arm["failed"])])
    work = result["workload"]
    start = f"Pool of {work['pool_tokens']:,} tokens, longs of {work['long_tokens']:,}, "
    start += f"{work['max_new_tokens']} output tokens.\n\n"
    return start + table(header, rows) + "\n\n" + conditions(result)


def low_load(result: Result) -> str:
    ratios = {arm: spread(result["ratios"][arm]["short_ttft_p50_ratio"], "x") for arm in ("ours", "off")}
    solo = ", ".join(f"{arm} {spread(of['short_ttft_s']['p50'])}" for arm, of in result["figures"].items())
    starts = result["workload"]["starts"]
    return (
        f"Median TTFT against stock: ours {ratios['ours']}, off {ratios['off']}. In seconds: {solo}.\n\n"
        f"{starts} starts of all servers · {conditions(result)}"
    )


def abort_storm(result: Result) -> str:
    return (
        f"{result['requests']} requests at {result['rate_per_s']:g} per second, {result['aborted']} of them aborted "
        f"({result['by_abort_request']} by `/abort_request`, {result['by_disconnect']} by disconnecting): "
        f"gauges at zero: {str(result['gauges_zero']).lower()}; KV usage back at its start: "
        f"{str(result['kv_restored']).lower()}; errors in the log: {result['errors_logged']}; "
        f"failed: {len(result['failed'])}."
    )


def sched_pass(result: Result) -> str:
    return (
        f"{result['waiting']:,} waiting, {result['long_share']:.0%} of them long, {result['passes']} passes: "
        f"added by us p50 {result['added_p50_ms']:.2f} ms, p99 {result['added_p99_ms']:.2f} ms; SGLang's own pass p50 "
        f"{result['stock_p50_ms']:.2f} ms, p99 {result['stock_p99_ms']:.2f} ms."
    )


def stock_client(result: Result) -> str:
    """Medians over rounds of what SGLang's own client reports."""
    rows = []
    for key in result["figures"]["stock"][0]:
        medians = [statistics.median(round_[key] for round_ in result["figures"][arm]) for arm in ("stock", "ours")]
        ratio = result.get(f"{key}_ratio")
        rows.append([f"`{key}`", *(f"{value:.4g}" for value in medians), "-" if ratio is None else f"{ratio:.2f}x"])
    work = result["workload"]
    conditions_ = f"{rounds_of(result)}, medians · {work['num_prompts']} prompts, input length {work['input_len']}"
    return table(["figure", "stock", "ours", "ours / stock"], rows) + "\n\n" + conditions_


PAGES: dict[str, Callable[[Result], str]] = {
    "hol": hol,
    "hol-burst": arms,
    "hol-ablation": arms,
    "hol-peer": arms,
    "chat": arms,
    "overload": overload,
    "kv-pressure": kv_pressure,
    "low_load": low_load,
    "abort_storm": abort_storm,
    "sched_pass": sched_pass,
    "stock_client": stock_client,
    "router_cost": goals.page,
    **emulated_pages.PAGES,
}


def folder_of(name: str, result: Result) -> str:
    """Below ``bench/results``: by what the measured device was."""
    if name in emulated_pages.PAGES:
        return "emulated"
    return "cpu" if result.get("device", "cpu") == "cpu" else "gpu"


def replace(page: str, start: str, end: str, text: str) -> str:
    """``page`` with ``text`` between the two markers. Raises ValueError where they do not stand exactly once."""
    found, count = re.subn(
        re.escape(start) + r".*?" + re.escape(end), lambda _: f"{start}\n\n{text}\n\n{end}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{start} ... {end} has to stand once, found {count} times")
    return found


def publish(name: str, source: Path, root: Path) -> None:
    result = json.loads(source.read_text(encoding="utf-8"))
    page = root / "docs" / "benchmarks.md"
    marks = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    page.write_text(replace(page.read_text(encoding="utf-8"), *marks, PAGES[name](result)), encoding="utf-8")
    if name == "hol":
        readme = root / "README.md"
        marks = "<!-- headline -->", "<!-- /headline -->"
        readme.write_text(replace(readme.read_text(encoding="utf-8"), *marks, headline(result)), encoding="utf-8")
    kept = root / "bench" / "results" / folder_of(name, result)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    picture = source.with_suffix(".png")
    if picture.exists() and picture.resolve() != (kept / f"{name}.png").resolve():
        shutil.copy(picture, kept / f"{name}.png")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="NAME=JSON", help=f"names: {', '.join(PAGES)}")
    args = parser.parse_args(argv)
    for given in args.results:
        name, _, path = given.partition("=")
        if name not in PAGES or not Path(path).is_file():
            parser.error(f"{given!r} is not NAME=FILE with a name of: {', '.join(PAGES)}")
    for given in args.results:
        name, _, path = given.partition("=")
        publish(name, Path(path), Path(__file__).resolve().parent.parent)
        print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
