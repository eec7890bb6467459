"""Everything that this project owes a GPU, in one command, within 8 minutes, keeping what it has if it is cut off.

    python -m bench.gpu.run --out bench/results/gpu                 a GPU, Qwen2.5-7B first, then 14B and 32B
    python -m bench.gpu.run --device cpu --out /tmp/out             the script proven on the demo model

(a) step time by (tokens, requests, history) for eager, breakable, full, ours-varlen, ours-grid, with capture seconds
and bytes; (b) PLA-Serve Fig. 6 in small; (c) hol; (d) kernels against their alternatives; (e) a timing profile for the
emulator. Weights are random and the same in every server. Parts run in the order of their worth; ``results.json`` and
the pictures are written anew after each. Last stdout line: the whole result as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu.models import SIZES, model_for
from bench.gpu.parts import Part, run_part
from bench.gpu.plots import plot_fig6, plot_kernels, plot_steps
from bench.gpu.steps import ARMS, TARGET
from bench.lib.report import environment

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "pla-sglang")
SECTIONS = ("steps", "fig6", "hol", "kernels", "profile")
LEAST_S = 15.0  # with less left, no part is started
# Seconds of a part: on a GPU, where a server takes about 25 s to start, and in the reduced form.
LIMITS = {
    "cuda": {"steps": 60, "kernels": 40, "fig6": 190, "hol": 90, "profile": 90},
    "cpu": dict.fromkeys(SECTIONS, 240),
}


def steps_part(size: str, arm: str, model: Path, args: argparse.Namespace) -> Part:
    output = args.out / f"steps.{size}.{arm}.json"
    flags: tuple[str, ...] = (
        "--arm",
        arm,
        "--model",
        str(model),
        "--device",
        args.device,
        "--rounds",
        str(args.rounds),
    )
    flags = (*flags, "--out", str(output))
    return Part("steps", f"{size} {arm}", "bench.gpu.steps", flags, LIMITS[args.device]["steps"], output)


CPU_ARMS = ("eager", "varlen", "grid")  # SGLang's own graphs need a GPU, ours have a double


def parts_of(args: argparse.Namespace) -> list[Part]:
    """The most wanted first. The reduced form leaves out what only a GPU has: other sizes and SGLang's own graphs."""
    limits, out, device = LIMITS[args.device], args.out, args.device
    models = {size: model_for(size, device, out) for size in args.sizes}
    first = args.sizes[0]
    arms = ARMS if device == "cuda" else CPU_ARMS
    found = [steps_part(first, arm, models[first], args) for arm in arms]
    kernels, fig6, fitted = out / "kernels.json", out / "fig6.json", out / f"profile.{first}.json"
    common = ("--model", str(models[first]), "--device", device)
    load = (*common, "--seconds", "5" if device == "cuda" else "3", "--out", str(fig6))
    profile = (*common, "--size", first, "--out", str(fitted))
    hol: tuple[str, ...] = ("--model-path", str(models[first]), "--device", device, "--out", str(out), "--rounds", "1")
    hol += ("--server-flags", "--load-format dummy --dtype bfloat16") if device == "cuda" else ("--quick",)
    found += [
        Part("kernels", "", "bench.gpu.kernels", ("--out", str(kernels)), limits["kernels"], kernels),
        Part("fig6", "", "bench.gpu.fig6", load, limits["fig6"], fig6),
        Part("hol", "", "bench.hol", hol, limits["hol"]),
        Part("profile", "", "bench.gpu.profile", profile, limits["profile"], fitted),
    ]
    found += [steps_part(size, arm, models[size], args) for size in args.sizes[1:] for arm in arms]
    return [part for part in found if part.section in args.parts]


def summary(steps: dict[str, Any]) -> dict[str, Any]:
    """Against eager and breakable, for the issue's shape, and whether greedy first tokens agree with eager's."""
    shape = TARGET.name
    if not any(shape in of_arm.get("shapes", {}) for of_arm in steps.values()):
        shape = next((name for of_arm in steps.values() for name in of_arm.get("shapes", {})), shape)
    at = {arm: of_arm["shapes"][shape] for arm, of_arm in steps.items() if shape in of_arm.get("shapes", {})}
    found: dict[str, Any] = {"shape": shape, "median_ms": {arm: one["median_ms"] for arm, one in at.items()}}
    for base in ("eager", "breakable"):
        if base in at:
            found[f"to_{base}"] = {arm: round(one["median_ms"] / at[base]["median_ms"], 4) for arm, one in at.items()}
    eager = steps.get("eager", {}).get("shapes", {})
    found["first_tokens_differ"] = {
        arm: {name: differing(eager[name], one) for name, one in of_arm["shapes"].items() if name in eager}
        for arm, of_arm in steps.items()
        if arm != "eager" and of_arm.get("shapes")
    }
    return found


def differing(wanted: dict[str, Any], found: dict[str, Any]) -> list[int]:
    """How many first tokens differ, and of how many."""
    pairs = [
        (one, other)
        for mine, theirs in zip(wanted["first_tokens"], found["first_tokens"], strict=False)
        for one, other in zip(mine, theirs, strict=True)
    ]
    return [sum(one != other for one, other in pairs), len(pairs)]


def gpu_name(device: str) -> str | None:
    if device != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def write(result: dict[str, Any], out: Path) -> None:
    """What is known so far: JSON and pictures."""
    for size, of_size in result["steps"].items():
        arms = {name: arm for name, arm in of_size.items() if name != "summary"}
        of_size["summary"] = summary(arms)
        plot_steps(arms, out / f"steps.{size}.png", size)
    plot_fig6(result["fig6"], out / "fig6.png")
    plot_kernels(result["kernels"], out / "kernels.png")
    (out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> dict[str, Any]:
    parts = parts_of(args)
    end_s = time.monotonic() + args.minutes * 60
    result: dict[str, Any] = {
        "bench": "gpu",
        "device": args.device,
        "gpu": gpu_name(args.device),
        "versions": versions(),
    }
    result |= {"sizes": list(args.sizes), "minutes": args.minutes, **environment()}
    result |= {section: {} for section in SECTIONS}
    result |= {"completed": [], "not_run": {part.title: "the run was cut off" for part in parts}}
    if args.device == "cpu":
        result["reduced"] = "CPU, demo model: the script is proven, its times say nothing about a GPU"
        gpu_only = [arm for arm in ARMS if arm not in CPU_ARMS and "steps" in args.parts]
        result["not_run"] |= {f"steps {arm}": "SGLang captures prefill graphs on a GPU only" for arm in gpu_only}
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


def keep(result: dict[str, Any], part: Part, found: dict[str, Any]) -> None:
    """Put the result of a part where it belongs, and say whether it ran."""
    if part.section == "steps":
        size, arm = part.name.split()
        result["steps"].setdefault(size, {})[arm] = found
    else:
        result[part.section] = found
    reason = found.get("failed") or found.get("not_run")
    if reason is None:
        result["not_run"].pop(part.title, None)
        result["completed"].append(part.title)
    else:
        result["not_run"][part.title] = reason
    print(f"    {found['seconds']:.0f} s{'' if reason is None else ': ' + reason}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["7b", "14b", "32b"])
    parser.add_argument("--parts", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default 8)")
    parser.add_argument("--rounds", type=int, default=15, help="timed passes of each shape (default 15)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/gpu"), help="folder for JSON, pictures and logs")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.rounds < 1:
        parser.error(f"--minutes {args.minutes:g} must be above 0, --rounds {args.rounds} at least 1")
    if args.device == "cpu":
        args.sizes = args.sizes[:1]
    args.out.mkdir(parents=True, exist_ok=True)
    result = run(args)
    print(json.dumps(result))
    return 0 if not any("failed" in str(reason) or "exit" in reason for reason in result["not_run"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
