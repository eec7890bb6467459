"""What is measured of one arm, one probe after the other, and how rounds become figures. The latter is pure."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from bench.routing.arms import Arm, Router

RATES_PER_S = (200, 400)
STREAM_EVENTS = 16
STREAM_GAP_S = 0.005
HELD_STREAMS = 500
HELD_GAP_S = 0.02  # 25,000 events a second
FLOOD_GAP_S = 0.00625  # 80,000 events a second offered
FOREVER = 1_000_000
LONG_TOKENS = 60_000
CALM_CORES = 0.35  # other work on the machine, in cores, up to which a sample counts as calm


class Client:
    """The client process; one plan at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.routing.client"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, plan: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(plan) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Raises RuntimeError where the client has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the client process has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        self.begin(plan)
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Meter:
    """CPU time of a router over a probe, and what else kept the machine busy meanwhile."""

    def __init__(self, router: Router | None, own: Sequence[psutil.Process]) -> None:
        self._router, self._own = router, own

    def __enter__(self) -> Meter:
        self._start_s, self._router_s, self._own_s = time.monotonic(), self._routers(), self._mine()
        self._busy_s = busy_s()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wall_s = time.monotonic() - self._start_s
        self.cpu_s = self._routers() - self._router_s
        others_s = busy_s() - self._busy_s - self.cpu_s - (self._mine() - self._own_s)
        self.other_cores = round(max(0.0, others_s / self.wall_s), 3)

    def _routers(self) -> float:
        return 0.0 if self._router is None else self._router.cpu_s()

    def _mine(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._own)


def busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def probes(arm: Arm, port: int, *, duration_s: float, seed: int) -> dict[str, dict[str, Any]]:
    """The plans for one arm, by name."""
    common = {"port": port, "duration_s": duration_s, "seed": seed, "quickack": arm.quickack}
    stream = common | {
        "kind": "open",
        "events": STREAM_EVENTS,
        "gap_s": STREAM_GAP_S,
        "stream": True,
        "connections": 64,
    }
    held = common | {"kind": "held", "events": FOREVER, "stream": True, "connections": HELD_STREAMS}
    closed = common | {"kind": "closed", "events": 1, "gap_s": 0.0}
    plans: dict[str, dict[str, Any]] = {f"stream_{rate}": stream | {"rate_per_s": rate} for rate in RATES_PER_S}
    if arm.quickack:
        return plans
    return plans | {
        "closed": closed | {"stream": False, "connections": 32},
        "long": closed | {"stream": True, "connections": 8, "tokens": LONG_TOKENS},
        "held": held | {"gap_s": HELD_GAP_S},
        "flood": held | {"gap_s": FLOOD_GAP_S},
    }


def sample(
    name: str, plan: dict[str, Any], client: Client, router: Router | None, own: Sequence[Any]
) -> dict[str, Any]:
    """One probe of one arm."""
    idle_bytes = 0 if router is None else router.relay_bytes()
    client.begin(plan)
    opened = client.read() if plan["kind"] == "held" else None
    if opened is not None and "open" not in opened:
        raise RuntimeError(f"{name}: streams did not open: {opened}")
    with Meter(router, own) as meter:
        open_bytes = 0 if router is None or opened is None else router.relay_bytes()
        result = client.read()
    return {
        **{key: result[key] for key in ("completed", "errors", "error", "delay_ms", "window_s", "ttfts_ms")},
        "cpu_s": meter.cpu_s,
        "other_cores": meter.other_cores,
        "idle_bytes": idle_bytes,
        "open_bytes": open_bytes,
    }


# -- figures -----------------------------------------------------------------------------------------------------------

Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # probe -> one sample a round


def calm(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those without much other work on the machine; the calmest one where there is none."""
    quiet = [one for one in samples if one["other_cores"] < CALM_CORES]
    return quiet or [min(samples, key=lambda one: one["other_cores"])]


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


def ttft_ms(samples: Sequence[Mapping[str, Any]], q: float) -> float | None:
    """Median over calm rounds of the round's quantile."""
    found = [quantile(one["ttfts_ms"], q) for one in calm(samples) if one["ttfts_ms"]]
    return statistics.median(found) if found else None


def per_completed_ms(samples: Sequence[Mapping[str, Any]]) -> float | None:
    found = [1e3 * one["cpu_s"] / one["completed"] for one in calm(samples) if one["completed"]]
    return statistics.median(found) if found else None


def per_s(samples: Sequence[Mapping[str, Any]]) -> float | None:
    found = [one["completed"] / one["window_s"] for one in calm(samples)]
    return statistics.median(found) if found else None


def minus(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def figures(samples: Samples, direct: Samples) -> dict[str, Any]:
    """One arm's figures. ``direct``: the same probes without a router, of the same run.

    TTFT is what the router adds: a quantile through it, less the direct median.
    """
    made: dict[str, Any] = {}
    for rate in RATES_PER_S:
        name = f"stream_{rate}"
        base = ttft_ms(direct[name], 0.5)
        suffix = "" if rate == RATES_PER_S[0] else f"_{rate}_per_s"
        made[f"added_ttft_p50_ms{suffix}"] = minus(ttft_ms(samples[name], 0.5), base)
        made[f"added_ttft_p99_ms{suffix}"] = minus(ttft_ms(samples[name], 0.99), base)
    made["cpu_ms_per_stream"] = per_completed_ms(samples[f"stream_{RATES_PER_S[0]}"])
    if "closed" in samples:
        made |= throughput(samples)
    made["errors"] = sum(one["errors"] for of_probe in samples.values() for one in of_probe)
    made["calm"] = all(one["other_cores"] < CALM_CORES for of_probe in samples.values() for one in calm(of_probe))
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in made.items()}


def throughput(samples: Samples) -> dict[str, Any]:
    held, flood = calm(samples["held"]), calm(samples["flood"])
    us = per_completed_ms(samples["held"])
    grown = [(one["open_bytes"] - one["idle_bytes"]) / HELD_STREAMS / 1024 for one in held]
    return {
        "cpu_ms_per_request": per_completed_ms(samples["closed"]),
        "requests_per_s": per_s(samples["closed"]),
        "long_body_rps": per_s(samples["long"]),
        "cpu_ms_per_long_body": per_completed_ms(samples["long"]),
        "us_per_event": None if us is None else us * 1e3,
        "event_delay_p50_ms": statistics.median(one["delay_ms"]["p50"] for one in held),
        "event_delay_p99_ms": statistics.median(one["delay_ms"]["p99"] for one in held),
        "events_per_s": per_s(samples["flood"]),
        "flood_delay_p99_ms": statistics.median(one["delay_ms"]["p99"] for one in flood),
        "mb_idle": min(one["idle_bytes"] for of_probe in samples.values() for one in of_probe) / 1e6,
        "kb_per_stream": statistics.median(grown),
    }
