"""``python -m bench.parity``: do the router's live decisions replay in the simulator?

Starts engines on an emulated device once, then one router a policy in front of them. Each serves the same chat mix and
records its decisions and what it saw; every recording is replayed through the simulator's kernel with policies built
afresh. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.lib.child import running_child
from bench.lib.parity_plot import plot_parity
from bench.lib.report import emit, environment, say, stdout
from bench.replay import replay
from bench.replaying.cluster import running_cluster
from bench.replaying.plan import Planned
from bench.replaying.result import count_wrong
from pla_sglang import chain
from pla_sglang.errors import PlaError
from pla_sglang.parity import replay_file
from pla_sglang.sim.parity import Parity
from pla_sglang.testing.server import ServerError, free_port

# All that run live; minimal-load is another name of static-pd.
POLICIES = (
    "round-robin,least-requests,least-tokens,two-choices,cache-aware,static-pd-round-robin,static-pd,pla,arrow-no-flips"
)
READY_S = 30.0
STOP_S = 40.0
TARGET = 0.99


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.parity", description=(__doc__ or "").split("\n\n")[1])
    made.add_argument("--policies", default=POLICIES, help="with commas between")
    made.add_argument("--prefill", type=int, default=2)
    made.add_argument("--decode", type=int, default=2)
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--time-scale", type=float, default=8.0)
    made.add_argument("--requests", type=int, default=200, help="for each policy")
    made.add_argument("--rate", type=float, default=8.0, help="requests/s")
    made.add_argument("--engine-args", default="", help="further arguments of every engine, quoted as one")
    made.add_argument("--router-args", default="", help="further arguments of every router, quoted as one")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--keep", action="store_true", help="go on from OUT/parity.json: measure only what is not there")
    made.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def workload(requests: int, rate_per_s: float, seed: int) -> list[Planned]:
    """Chat-like: most prompts short, some long, a third with a common beginning; Poisson arrivals."""
    rng = random.Random(seed)
    shared = chain.prompt_of(900, 1, rng)[:800]
    at_s, planned = 0.0, []
    for index in range(requests):
        at_s += rng.expovariate(rate_per_s)
        tokens = rng.randrange(2000, 8000) if rng.random() < 0.15 else max(5, int(rng.lognormvariate(4.2, 1.0)))
        answer = rng.randint(1, 60)
        prompt = chain.prompt_of(tokens, answer, rng)
        planned.append(Planned(index, at_s, shared + prompt if index % 3 == 0 else prompt, answer))
    return planned


@contextlib.contextmanager
def running_router(workers: Sequence[str], arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Starts ``launch_router`` and yields its URL once it can serve. Raises ServerError."""
    port = free_port()
    named = [part for url in workers for part in ("--worker", url)]
    command = [sys.executable, "-m", "pla_sglang.launch_router", "--port", str(port), *named, *arguments]
    url = f"http://127.0.0.1:{port}"
    with running_child(command, log, stop_s=STOP_S) as process:
        _wait(process, url, log)
        yield url


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(urllib.error.URLError, OSError):
            opener.open(f"{url}/health", timeout=5).read()
            return
        time.sleep(0.1)
    raise ServerError(f"the router did not get ready:\n{log.read_text(errors='replace')[-3000:]}")


def one_policy(policy: str, workers: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Serve, record, replay. Raises ServerError, RecordError."""
    record = options.out / f"parity-{policy}.jsonl.gz"
    arguments = ["--policy", policy, "--record", str(record), "--slo-ttft-ms", "3200", "--boundary", "500"]
    planned = workload(options.requests, options.rate, options.seed)
    with running_router(workers, [*arguments, *options.router_args.split()], options.out / f"{policy}.log") as url:
        records = replay(url, planned, timeout_s=300)
    _, result = replay_file(record)
    failed = [one.error for one in records if one.error is not None]
    say(f"{policy}: {result.count} decisions, {result.identical_share:.4f} identical, {len(failed)} failed")
    for error in failed[:3]:
        say(f"failed: {error}")
    return figures(result, failed=len(failed), wrong=sum(map(count_wrong, (one for one in records if not one.error))))


def figures(result: Parity, *, failed: int, wrong: int) -> dict[str, Any]:
    return {
        "decisions": result.count,
        "identical": sum(result.identical.values()),
        "identical_share": result.identical_share,
        "by_kind": dict(result.decisions),
        "reasons": dict(result.reasons),
        "failed": failed,
        "tokens_wrong": wrong,
    }


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What results must share to stand in one table."""
    return {
        "bench": "parity",
        "seed": options.seed,
        "requests": options.requests,
        "rate_rps": options.rate,
        "profile": options.profile,
        "time_scale": options.time_scale,
        "instances": options.prefill + options.decode,
    }


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """Policies that an earlier run with ``--keep`` has measured in the same way, by name."""
    path = options.out / "parity.json"
    if not options.keep or not path.is_file():
        return {}
    earlier = json.loads(path.read_text(encoding="utf-8"))
    same = all(earlier.get(name) == value for name, value in settings_of(options).items())
    return dict(earlier["by_policy"]) if same else {}


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.requests, options.policies = 40, "cache-aware,pla"
    options.out.mkdir(parents=True, exist_ok=True)
    fleet = ["--prefill", str(options.prefill), "--decode", str(options.decode), "--router", "none"]
    device = ["--pla-emulate", options.profile, "--pla-time-scale", str(options.time_scale)]
    engine = ["--incremental-streaming-output", *options.engine_args.split()]
    by_policy, commit = kept(options), environment()["plugin_commit"]
    wanted = [policy for policy in options.policies.split(",") if policy not in by_policy]
    with running_cluster([*fleet, *device, *engine], options.out, "parity-cluster") as described:
        workers = [one["url"] for one in described["instances"]]
        for policy in wanted:
            by_policy[policy] = one_policy(policy, workers, options) | {"plugin_commit": commit}
            (options.out / "parity.json").write_text(
                json.dumps(result_of(by_policy, options)), encoding="utf-8"
            )  # ``--keep`` goes on from here
    result = result_of(by_policy, options)
    show(by_policy)
    plot_parity(by_policy, options.out / "parity.png")
    emit(result, options.out, "parity")
    return 0 if result["identical_share"] >= TARGET and not result["tokens_wrong"] else 1


def result_of(by_policy: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    return settings_of(options) | totals(by_policy) | {"by_policy": by_policy, "environment": environment()}


def totals(by_policy: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(one[name] for one in by_policy.values()) for name in ("decisions", "failed", "tokens_wrong")}
    identical = sum(one["identical"] for one in by_policy.values())
    commits = sorted({one["plugin_commit"] for one in by_policy.values()})
    return {**counts, "identical_share": identical / counts["decisions"], "commits": commits}


def show(by_policy: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="live decisions, replayed in virtual time")
    for column in ("policy", "decisions", "identical", "failed requests", "wrong tokens"):
        table.add_column(column)
    for policy, one in by_policy.items():
        table.add_row(policy, *(str(one[key]) for key in ("decisions", "identical", "failed", "tokens_wrong")))
    stdout.print(table)


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except (ServerError, PlaError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
