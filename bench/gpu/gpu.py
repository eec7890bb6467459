"""Everything that this project owes a GPU, in one command, within 7 minutes, keeping what it has if it is cut off.

    python -m bench gpu --out bench/results/gpu                 a GPU, Qwen2.5-7B first, then 14B and 32B
    python -m bench gpu --device cpu --out /tmp/out             the script proven on the demo model

(a) step time by (tokens, requests, history) for eager, breakable, full, ours-varlen, ours-grid, with capture seconds
and bytes; (b) short chats, with answers of one token (PLA-Serve Fig. 6 in small) and longer ones; (c) hol; (d) kernels
against their alternatives; (e) a timing profile for the emulator; (f) decodes that join prefill passes; (g) requests
that move between two engines. Weights are random and the same in every server. Parts run in the
order of their worth; ``results.json`` and the pictures are written anew after each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.models import SIZES, model_for
from bench.gpu.parts import Part, run_part, write_result
from bench.gpu.steps import ARMS, TARGET
from bench.harness.arms import OURS, RIDE, STOCK
from bench.harness.bench import measuring
from bench.harness.cli import add_dataset, dataset_of
from bench.harness.figures import COLOURS, draw_bars, panels
from bench.harness.report import emit, environment, installed_version
from pla_sglang.common.errors import ConfigError

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "pla-sglang")
LEAST_S = 15.0  # with less left, no part is started
# Seconds of a part: on a GPU, where a server takes 25 to 60 s to start, and in the reduced form.
LIMITS_S = {
    "chats": 240,
    "answers": 150,
    "hol": 220,
    "moves": 150,
    "mixed": 60,
    "steps": 60,
    "kernels": 40,
    "profile": 90,
}
CPU_LIMIT_S = 240
SECTIONS = tuple(LIMITS_S)


def list_parts(args: argparse.Namespace) -> list[Part]:
    """The most wanted first. The reduced form leaves out what only a GPU has: other sizes and SGLang's own graphs."""
    device, out, first = args.device, args.out, args.sizes[0]
    models = {size: str(model_for(size, device, out)) for size in args.sizes}
    limit_s = LIMITS_S if device == "cuda" else dict.fromkeys(SECTIONS, CPU_LIMIT_S)

    def make_part(title: str, function: str, file: str = "", **settings: object) -> Part:
        output = out / f"{file or title.replace(' ', '.')}.json"
        command = ("bench.gpu.parts", function, json.dumps(settings | {"out": str(output)}))
        return Part(title, command, limit_s[title.partition(" ")[0]], output)

    steps = [
        make_part(f"steps {size} {arm}", "steps.measure", arm=arm, model=models[size], device=device)
        for size in args.sizes
        for arm in ARMS[device]
    ]
    hol = ["bench", "hol", "--model-path", models[first], "--device", device, "--out", str(out), "--rounds", "1"]
    on_gpu = ["--server-flags", "--load-format dummy --dtype bfloat16", "--arms", f"{STOCK},{OURS},{RIDE}"]
    hol += on_gpu if device == "cuda" else ["--quick"]
    served = {"model": models[first], "device": device}
    fewer = {"rounds": 1, "seconds": 2.0, "arms": ["stock", "ours"], "clients": [1, 4]}
    turns = None if device == "cuda" else fewer
    dataset = {"dataset": str(args.dataset)} if args.dataset else {}
    parts = [
        make_part("chats", "chats.measure", answer_tokens=1, turns=turns, **served, **dataset),
        Part("hol", tuple(hol), limit_s["hol"], out / "hol.json"),
        make_part("answers", "chats.measure", answer_tokens=64, turns=turns, **served, **dataset),
        make_part("moves", "moves.measure", **served),
        make_part("mixed", "mixed.measure", **served),
        *steps[: len(ARMS[device])],
        make_part("kernels", "kernels.measure"),
        make_part("profile", "chats.fit_profile", f"profile.{first}", size=first, **served),
        *steps[len(ARMS[device]) :],
    ]
    return [part for part in parts if part.section in args.parts]


def summarise(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Against eager and breakable, for the issue's shape, and whether greedy first tokens agree with eager's."""
    measured = {arm: of_arm["shapes"] for arm, of_arm in steps.items() if of_arm.get("shapes")}
    names = [name for shapes in measured.values() for name in shapes]
    shape = TARGET.name if TARGET.name in names or not names else names[0]
    median_ms = {arm: shapes[shape]["median_ms"] for arm, shapes in measured.items() if shape in shapes}
    summary: dict[str, Any] = {"shape": shape, "median_ms": median_ms}
    for base in ("eager", "breakable"):
        if base in median_ms:
            summary[f"to_{base}"] = {arm: round(value_ms / median_ms[base], 4) for arm, value_ms in median_ms.items()}
    eager = measured.pop("eager", {})
    summary["first_tokens_differ"] = {
        arm: {name: count_differing(eager[name], figures) for name, figures in shapes.items() if name in eager}
        for arm, shapes in measured.items()
    }
    return summary


def count_differing(wanted: Mapping[str, Any], seen: Mapping[str, Any]) -> list[int]:
    """How many first tokens differ, and of how many."""
    passes = zip(wanted["first_tokens"], seen["first_tokens"], strict=False)
    differ = [one != other for of_pass in passes for one, other in zip(*of_pass, strict=True)]
    return [sum(differ), len(differ)]


def write(result: dict[str, Any], out: Path) -> None:
    """What is known so far: JSON and pictures."""
    for size, of_size in result["steps"].items():
        arms = {name: arm for name, arm in of_size.items() if name != "summary"}
        of_size["summary"] = summarise(arms)
        plot_steps(arms, out / f"steps.{size}.png", size)
    for section in ("chats", "answers"):
        if compared := result[section].get("compared"):
            plot_chats(compared, out / f"{section}.png")
    plot_kernels(result["kernels"], out / "kernels.png")
    write_result(result, out / "results.json")


def start_result(args: argparse.Namespace, parts: Sequence[Part]) -> dict[str, Any]:
    """The result of a run in which nothing has been measured."""
    import torch

    result: dict[str, Any] = {
        "bench": "gpu",
        "device": args.device,
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" and torch.cuda.is_available() else None,
        "versions": {package: installed_version(package) for package in PACKAGES},
        "sizes": list(args.sizes),
        "minutes": args.minutes,
        **environment(),
        **{section: {} for section in SECTIONS},
        "completed": [],
        "not_run": {part.title: "the run was cut off" for part in parts},
    }
    if args.device == "cpu":
        result["reduced"] = "CPU, demo model: the script is proven, its times say nothing about a GPU"
        gpu_only = [arm for arm in ARMS["cuda"] if arm not in ARMS["cpu"] and "steps" in args.parts]
        result["not_run"] |= {f"steps {arm}": "SGLang captures prefill graphs on a GPU only" for arm in gpu_only}
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Parts one after the other while there is time; what is known is written after each."""
    parts = list_parts(args)
    end_s = time.monotonic() + args.minutes * 60
    result = start_result(args, parts)
    with measuring():
        for number, part in enumerate(parts, 1):
            left_s = end_s - time.monotonic()
            if left_s < LEAST_S:
                result["not_run"] |= {rest.title: "no time left" for rest in parts[number - 1 :]}
                break
            limit_s = min(part.limit_s, left_s)
            print(f"[{number}/{len(parts)}] {part.title}, at most {limit_s:.0f} s of {left_s:.0f} s left", flush=True)
            log = args.out / f"{part.title.replace(' ', '.')}.log"
            keep(result, part, run_part(part, limit_s=limit_s, log=log))
            write(result, args.out)
    write(result, args.out)
    return result


def keep(result: dict[str, Any], part: Part, of_part: dict[str, Any]) -> None:
    """Put the result of a part where it belongs, and say whether it ran."""
    section, *names = part.title.split()
    if names:
        result[section].setdefault(names[0], {})[names[1]] = of_part
    else:
        result[section] = of_part
    reason = of_part.get("failed") or of_part.get("not_run")
    if reason is None:
        result["not_run"].pop(part.title, None)
        result["completed"].append(part.title)
    else:
        result["not_run"][part.title] = reason
    print(f"    {of_part['seconds']:.0f} s{'' if reason is None else ': ' + reason}", flush=True)


def plot_steps(steps: Mapping[str, Any], path: Path, size: str) -> None:
    groups: dict[str, dict[str, float]] = {}
    for arm, of_arm in steps.items():
        for shape, figures in of_arm.get("shapes", {}).items():
            groups.setdefault(shape, {})[arm] = figures["median_ms"]
    if groups:
        title = f"{size}: requests x mean new tokens + history of each"
        with panels(path, size=(2 + 0.9 * len(groups), 4.2), title=title) as (panel,):
            draw_bars(panel, groups, rotation=30)
            panel.set_ylabel("one prefill pass, ms (median)")


def plot_chats(compared: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    labels = {"rps": "requests/s", "ttft_p50_ms": "TTFT p50, ms", "ttft_p90_ms": "TTFT P90, ms"}
    clients = [int(level) for level in compared]
    with panels(path, len(labels), size=(12, 3.8)) as grid:
        for panel, (key, label) in zip(grid, labels.items(), strict=True):
            for colour, arm in zip(COLOURS, next(iter(compared.values())), strict=False):
                values = [by_arm[arm].get(key) for by_arm in compared.values()]
                panel.plot(clients, values, "o-", color=colour, label=arm)
            panel.set_xscale("log", base=2)
            panel.set(xlabel="clients", ylabel=label)


def plot_kernels(kernels: Mapping[str, Any], path: Path) -> None:
    cases = {name: case for name, case in kernels.items() if isinstance(case, dict) and "ours_us" in case}
    if cases:
        with panels(path, size=(2 + 0.8 * len(cases), 4.2)) as (panel,):
            groups = {name: {"torch": case["torch_us"], "ours": case["ours_us"]} for name, case in cases.items()}
            draw_bars(panel, groups, rotation=30)
            panel.set(yscale="log", ylabel="microseconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["7b", "14b", "32b"])
    parser.add_argument("--parts", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add_dataset(parser)
    parser.add_argument("--minutes", type=float, default=7.0, help="for everything (default 7)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/gpu"), help="folder for JSON, pictures and logs")


def run(args: argparse.Namespace) -> int:
    """1 where a part failed. Raises ConfigError."""
    if args.minutes <= 0:
        raise ConfigError(f"--minutes {args.minutes:g} is out of range; allowed: above 0")
    dataset_of(args)  # a file that no part can use ends the run here
    if args.device == "cpu":
        args.sizes = args.sizes[:1]
    args.out.mkdir(parents=True, exist_ok=True)
    result = measure(args)
    emit(result, "gpu")
    return 0 if not any("failed" in str(reason) or "exit" in reason for reason in result["not_run"].values()) else 1
