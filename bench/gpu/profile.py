"""Part (e): a timing profile of this machine for the emulator, fitted on a stock server.

python -m bench.gpu.profile --model FOLDER --size 7b --device cuda --out profile.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.models import model_flags
from bench.lib.arms import STOCK_MODULE, stock_env
from pla_sglang import profile
from pla_sglang.testing.server import Server, running

POINTS: dict[str, list[str]] = {
    "cuda": [],  # those of pla_sglang.profile
    "cpu": ["--prefill-tokens", "16,64,128,256,512", "--decode-batches", "1,4", "--decode-contexts", "64,256"],
}


def measure(model: Path, size: str, device: str, out: Path) -> int:
    """Starts a server, measures it as a client, writes the profile. Returns the fitting command's exit status."""
    flags = ("--device", device, *model_flags(device), "--log-level", "warning")
    server = Server(model, flags, module=STOCK_MODULE, env=stock_env(device), stop_timeout_s=2.0)
    with running(server):
        source = f"bench.gpu.profile on {device}, Qwen2.5-{size.upper()} with random weights, stock SGLang"
        asked = ["--url", server.url, "--name", f"{device}-{size}", "--source", source, "--out", str(out)]
        return profile.main([*asked, *POINTS[device]])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.profile", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="profile, JSON")
    args = parser.parse_args(argv)
    status = measure(args.model, args.size, args.device, args.out)
    if status == 0:
        json.loads(args.out.read_text(encoding="utf-8"))
    return status


if __name__ == "__main__":
    sys.exit(main())
