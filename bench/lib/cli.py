"""The command line that all benches share, and how they run and stop."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench.lib.arms import ARM_NAMES, OURS, STOCK, Arm, ArmError, build_arms, detect_device, shared_flags
from bench.lib.fleet import Fleet
from bench.lib.server import ServerError
from bench.lib.workload import Vocabulary

_MAX_LINE_CHARS = 400


class BenchError(RuntimeError):
    """The bench cannot go on; the message says why."""


class _Help(argparse.HelpFormatter):
    """Shows a default where there is one worth showing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, "", []) and action.default is not argparse.SUPPRESS
        if shown and "default" not in (action.help or ""):
            return f"{action.help or ''} (default: %(default)s)".lstrip()
        return action.help


def make_parser(name: str, description: str, *, rounds: int, arms: str = f"{STOCK},{OURS}") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=lambda prog: _Help(prog, max_help_position=28, width=110),
    )
    run = parser.add_argument_group("run")
    run.add_argument("--rounds", type=int, default=rounds, help="times every arm gets the workload")
    run.add_argument("--seed", type=int, default=0, help="decides lengths, tokens and arrivals")
    run.add_argument("--quick", action="store_true", help="a small, short run that only shows that everything works")
    run.add_argument("--out", type=Path, default=Path("bench_out"), help="folder for JSON, picture and server logs")
    compared = parser.add_argument_group("arms")
    compared.add_argument("--arms", default=arms, help=f"comma-separated, from: {', '.join(ARM_NAMES)}")
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
    server.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is an NVIDIA driver"
    )
    server.add_argument("--server-flags", default="", metavar="FLAGS", help="further flags for every arm")
    server.add_argument("--kv-tokens", type=int, help="KV pool of every arm; default: fits the workload on a CPU")
    server.add_argument("--start-timeout-s", type=float, default=600.0, metavar="S")
    server.add_argument("--request-timeout-s", type=float, default=300.0, metavar="S")
    return parser


def check_common(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Resolve 'auto' and refuse what cannot work, with the name and the value."""
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is out of range; allowed: at least 1")
    args.device = detect_device() if args.device == "auto" else args.device
    args.model_name = "demo model" if args.model_path is None else args.model_path.name
    if args.model_path is None:
        args.model_path = _demo_model()
    if not (args.model_path / "config.json").is_file():
        parser.error(f"--model-path {args.model_path} holds no config.json; give a folder with a model")


def _demo_model() -> Path:
    from pla_sglang.demo import demo_model_path

    return Path(demo_model_path())


def arms_of(args: argparse.Namespace) -> list[Arm]:
    return build_arms(
        [name for name in args.arms.split(",") if name],
        args.peer,
        device=args.device,
        our_flags=shlex.split(args.our_flags),
        ablation=args.ablation,
    )


def make_fleet(
    args: argparse.Namespace, arms: Sequence[Arm], *, chunk_tokens: int, kv_tokens: int | None, bench: str
) -> Fleet:
    """``kv_tokens`` is the bench's own choice for a CPU; a GPU decides by its memory unless the user names a size."""
    chosen = args.kv_tokens or (kv_tokens if args.device == "cpu" else None)
    flags = shared_flags(
        model_path=args.model_path,
        device=args.device,
        chunk_tokens=chunk_tokens,
        kv_tokens=chosen,
        extra=shlex.split(args.server_flags),
    )
    return Fleet(
        arms,
        flags,
        device=args.device,
        log_dir=args.out / bench,
        start_timeout_s=args.start_timeout_s,
        request_timeout_s=args.request_timeout_s,
    )


def vocabulary_of(args: argparse.Namespace) -> Vocabulary:
    return Vocabulary.of_model(args.model_path)


def run_bench(main: Callable[[], Awaitable[int]]) -> int:
    """Run the bench; on Ctrl-C or SIGTERM cancel it, so that every server is stopped on the way out."""

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main()

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        print("interrupted; all servers are stopped", file=sys.stderr)
        return 130
    except (ArmError, BenchError, ServerError) as error:
        # SGLang logs all its arguments in one line of 8 KB.
        lines = [line[:_MAX_LINE_CHARS] for line in f"error: {error}".splitlines()]
        print("\n".join(lines), file=sys.stderr)
        return 1
