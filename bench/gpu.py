"""Everything that this part of the project owes a GPU, in one go: hol, chat and low load on a random-weight Qwen2.5.

    python -m bench.gpu --size 7b --out bench/results/h200 --minutes 25

Stock SGLang runs with its best flags (on CUDA it captures prefill graphs by default) against ours. Weights are random
but the same in every server, so times are those of the real architecture while texts mean nothing. Each bench is a
process of its own with a share of the time; what is finished is kept if the machine is taken away.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Published architecture of Qwen2.5 (config.json of the model cards).
_COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SIZES: dict[str, dict[str, int]] = {
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Bench, its arguments, and its share of the time.
PLAN: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("hol", ("--scale", "1", "--rounds", "5"), 0.45),
    ("chat", ("--rounds", "3"), 0.3),
    ("low_load", ("--rounds", "3", "--starts", "1"), 0.25),
)


def make_model(size: str, folder: Path) -> Path:
    """A model folder without weights: the architecture of ``size`` and the demo model's tokenizer."""
    from pla_sglang.demo import demo_model_path

    folder.mkdir(parents=True, exist_ok=True)
    source = Path(demo_model_path())
    own = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokens = {key: own[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in own}
    config = {**_COMMON, **SIZES[size], **tokens}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder


def run_one(
    bench: str, extra: tuple[str, ...], *, model: Path, out: Path, device: str, limit_s: float
) -> dict[str, Any]:
    """Run one bench as a process; its JSON line, or what went wrong. Never raises for a bench that fails."""
    command = [sys.executable, "-m", f"bench.{bench}", *extra]
    command += ["--model-path", str(model), "--device", device, "--out", str(out)]
    if device == "cuda":
        command += ["--server-flags", "--load-format dummy --dtype bfloat16"]
    print(f"== {bench}, at most {limit_s:.0f} s: {' '.join(command)}", flush=True)
    started_s = time.monotonic()
    with (out / f"{bench}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the bench stops its servers on SIGTERM
            output, _ = process.communicate()
    print(output, flush=True)
    result = _last_json(output)
    if result is None:
        result = {"bench": bench, "failed": f"exit {process.returncode} after {time.monotonic() - started_s:.0f} s"}
    (out / f"{bench}.result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    return result


def _last_json(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            loaded: dict[str, Any] = json.loads(line)
            return loaded
    return None


def note(results: dict[str, dict[str, Any]], size: str) -> str:
    """A short page about what was measured."""
    keys = (
        "short_ttft_p99_gain",
        "short_ttft_p50_ratio",
        "long_ttft_p90_ratio",
        "throughput_ratio",
        "outputs_identical",
    )
    lines = [f"# Random-weight Qwen2.5-{size.upper()}: stock SGLang (best flags) against pla_sglang", ""]
    lines += ["| bench | " + " | ".join(keys) + " |", "| --- |" + " --- |" * len(keys)]
    for bench, result in results.items():
        cells = [str(result.get(key, "-")) for key in keys]
        lines.append(f"| {bench} | " + " | ".join(cells) + " |")
        if "failed" in result:
            lines.append(f"| {bench} | failed: {result['failed']} |" + " |" * (len(keys) - 1))
    lines += [
        "",
        "Ratios are ours / stock; the gain is stock / ours. Details: the JSON files and pictures beside this page.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="7b", help="architecture (default 7b)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu"), help="folder for results")
    parser.add_argument("--minutes", type=float, default=25.0, help="time for everything (default 25)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu proves the script with the demo model"
    )
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g} is out of range; allowed: above 0")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda":
        model = make_model(args.size, args.out / f"qwen2.5-{args.size}-random")
    else:
        from pla_sglang.demo import demo_model_path

        model = Path(demo_model_path())
    results: dict[str, dict[str, Any]] = {}
    for bench, extra, share in PLAN:
        if args.device == "cpu":
            extra = ("--quick",)
        limit_s = args.minutes * 60 * share
        results[bench] = run_one(bench, extra, model=model, out=args.out, device=args.device, limit_s=limit_s)
        (args.out / "README.md").write_text(note(results, args.size), encoding="utf-8")
    print(json.dumps({"bench": "gpu", "size": args.size, "results": results}))
    return 0 if all("failed" not in result for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
