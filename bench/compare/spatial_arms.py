"""What the bench ``spatial`` measures: its arms in both forms of the pools, its workload, and one step of an arm.

===================  ============================================  =====================================================
arm                  layout dp: one server, N data-parallel ranks  layout pd: P prefill and D decode instances
===================  ============================================  =====================================================
``spatial``          pools of ranks                                pools of prefill instances in our router
``temporal``         temporal ranks, round robin                   temporal prefill instances, our router, minimal load
``dp``               stock, round robin over the ranks             stock, SGLang's router, round robin
``router:POLICY``    N stock servers, SGLang's router              stock, SGLang's router
===================  ============================================  =====================================================

SGLang's router has ``bucket`` for prefill instances only. Stock engines with other flags, as far as the installed
SGLang has them: ``dp/PRESET`` and ``router:POLICY/PRESET`` (``bench.harness.arms.preset_arguments``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import servers
from bench.harness.arms import find_lacking_of_preset, preset_arguments
from bench.harness.cli import PD_POLICIES, UNIFIED_POLICIES, device_flags
from bench.harness.load_client import START_DELAY_S
from bench.harness.replay import Planned, Record, count_wrong, lag_s, plan, replay, served, text_body
from bench.harness.report import environment, say, say_errors
from bench.harness.servers import Router
from bench.harness.steps import Row
from bench.harness.talks import Dataset
from bench.harness.workload import poisson_arrivals
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.sim.metrics.goodput import quantile
from pla_sglang.sim.workload import Trace
from pla_sglang.testing.server import fetch

BOUNDARY_TOKENS = 512
SHORT_MEDIAN_TOKENS, SHORT_SIGMA, SHORT_MAX_TOKENS = 100, 0.8, BOUNDARY_TOKENS - 1
LONG_TOKENS = (3000, 7000)
OUTPUT_TOKENS = 2
WARM_UP_SHORTS, WARM_UP_LONGS = 24, 8

SPATIAL, TEMPORAL, PLAIN, ROUTER = "spatial", "temporal", "dp", "router:"
BUCKET, CACHE_AWARE = f"{ROUTER}bucket", f"{ROUTER}cache_aware"
RANKS, PAIRS = "dp", "pd"
LAYOUTS = (RANKS, PAIRS)
# With chunks just above the shorts.
BEST_STOCK = {
    RANKS: (f"{CACHE_AWARE}/hrrn", f"{CACHE_AWARE}/spf-640", f"{CACHE_AWARE}/spf-mix-640"),
    PAIRS: (f"{CACHE_AWARE}/hrrn", f"{CACHE_AWARE}/spf-640", f"{BUCKET}/spf-640"),
}
DEFAULT_ARMS = {
    RANKS: (SPATIAL, TEMPORAL, PLAIN, "router:power_of_two", CACHE_AWARE, *BEST_STOCK[RANKS]),
    PAIRS: (SPATIAL, TEMPORAL, PLAIN, "router:power_of_two", CACHE_AWARE, BUCKET, *BEST_STOCK[PAIRS]),
}
REQUEST_TIMEOUT_S = 300.0
SHOWN_ERRORS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all arms share; times of device. Raises ConfigError: a value out of range."""

    layout: str = PAIRS
    profile: str = "h100-llama3.1-8b-tp1"
    time_scale: float = 8.0
    slo_ttft_s: float = 0.4
    prefill: int = 4  # instances of layout ``pd``, or ranks of layout ``dp``
    decode: int = 2  # instances of layout ``pd``
    interval_s: float = 0.5  # of the pressure controller
    cool_down_s: float = 2.0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"--layout {self.layout!r} is not known; allowed: {', '.join(LAYOUTS)}")
        for name in ("time_scale", "slo_ttft_s", "interval_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} {value} is out of range; allowed: above 0")
        if self.prefill < 2 or self.decode < 1:
            raise ConfigError(f"--prefill {self.prefill}, --decode {self.decode}; allowed: from 2, from 1")

    def target_ms(self) -> str:
        """The TTFT target, for a flag: targets are wall time."""
        return f"{self.slo_ttft_s * self.time_scale * 1e3:g}"

    def pressure_flags(self, prefix: str) -> list[str]:
        """Of the controller of the pools, in the engine or in the router: they are device time there too."""
        interval, pause = f"{prefix}pressure-interval-ms", f"{prefix}pressure-cool-down-ms"
        return [interval, f"{self.interval_s * 1e3:g}", pause, f"{self.cool_down_s * 1e3:g}"]


def check_arm(arm: str, setting: Setting) -> None:
    """Raises ConfigError for an arm that the layout does not have, ArmError for an unknown preset of stock."""
    policies = PD_POLICIES if setting.layout == PAIRS else UNIFIED_POLICIES
    known = [SPATIAL, TEMPORAL, PLAIN, *(ROUTER + policy for policy in policies)]
    base, preset = split_arm(arm)
    if base not in known or (preset and is_ours(base)):
        raise ConfigError(f"arm {arm!r} is not known in layout {setting.layout}; allowed: {', '.join(known)}")
    preset_of(arm, setting)


def split_arm(arm: str) -> tuple[str, str]:
    """Without and with what follows the slash: the preset of stock; empty: its defaults."""
    base, _, preset = arm.partition("/")
    return base, preset


def preset_of(arm: str, setting: Setting) -> tuple[str, ...]:
    """Arguments of ``launch_cluster`` that make the stock engines of ``arm``. Raises ArmError."""
    preset = split_arm(arm)[1]
    return preset_arguments(preset, pairs=setting.layout == PAIRS) if preset else ()


def find_lacking(arm: str, setting: Setting) -> list[str]:
    """What ``arm`` needs and the installed SGLang does not have. Raises ArmError."""
    preset = split_arm(arm)[1]
    return find_lacking_of_preset(preset, pairs=setting.layout == PAIRS) if preset else []


def engine_arguments(arm: str, setting: Setting, telemetry: str) -> list[str]:
    """Of ``launch_cluster``, without a router. Arms with the same arguments can be measured on the same engines.

    ``telemetry``: an address for load reports. Raises ConfigError, see ``check_arm``.
    """
    check_arm(arm, setting)
    common = ["--router", "none", "--quiet", *device_flags(setting.profile, setting.time_scale)]
    ours = ["--pla-boundary", str(BOUNDARY_TOKENS), "--pla-slo-ttft-ms", setting.target_ms()]
    if setting.layout == PAIRS:
        fleet = ["--prefill", str(setting.prefill), "--decode", str(setting.decode)]
        if not is_ours(arm):
            return [*fleet, *common, *preset_of(arm, setting)]
        prefill = " ".join(["--prefill-disagg", "temporal", *ours])
        return [*fleet, *common, "--prefill-args", prefill, "--pla-telemetry", telemetry]
    ranks = str(setting.prefill)
    if arm.startswith(ROUTER):
        return ["--unified", ranks, *common, *preset_of(arm, setting)]
    server = ["--unified", "1", "--dp-size", ranks, "--load-balance-method", "round_robin"]
    if is_ours(arm):
        server += ["--prefill-disagg", arm, *ours]
    if arm == SPATIAL:
        server += setting.pressure_flags("--pla-")
    return [*server, *common, *preset_of(arm, setting)]


def is_ours(arm: str) -> bool:
    return arm in (SPATIAL, TEMPORAL)


def router_of(arm: str, setting: Setting, telemetry: str) -> Router | None:
    """What stands before the engines of ``arm``; None: the one server itself."""
    if setting.layout == RANKS and not arm.startswith(ROUTER):
        return None
    if not is_ours(arm):
        base = split_arm(arm)[0]
        return Router("sglang", "round_robin" if base == PLAIN else base.removeprefix(ROUTER))
    flags = ["--slo-ttft-ms", setting.target_ms(), "--telemetry", telemetry]
    if arm == SPATIAL:
        return Router("pla", "pla", ("--boundary", str(BOUNDARY_TOKENS), *flags, *setting.pressure_flags("--")))
    return Router("pla", "minimal-load", tuple(flags))


# -- the workload: chat-like short prompts all the time, long ones at a rate that changes ------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """Conversations that begin in device time, with a short or a long prompt; all later prompts are short.

    Rates are of conversations; a run has as many equal parts as a rate has values. ``turns``: mean number of prompts of
    a conversation, geometric; each is due ``think_s`` on average after the one before, and not before its answer. None
    is due after the end. ``short_tokens``: of short prompts, drawn evenly, in place of chat-like lengths. ``dataset``:
    recorded conversations, whose turns and prompts count instead of drawn ones.

    Raises ConfigError: a value out of range, or nothing that arrives.
    """

    duration_s: float
    short_rps: tuple[float, ...]
    long_rps: tuple[float, ...]
    turns: float = 1.0
    think_s: float = 1.0
    short_tokens: tuple[int, int] | None = None
    dataset: Dataset | None = None

    def __post_init__(self) -> None:
        for name, least in (("duration_s", 0.0), ("turns", 1.0), ("think_s", 0.0)):
            value = getattr(self, name)
            if value < least or not value:
                raise ConfigError(f"{name} {value} is out of range; allowed: above 0, turns from 1")
        rates = (*self.short_rps, *self.long_rps)
        if min(rates) < 0 or not max(rates) > 0:
            raise ConfigError(f"--short-rps and --long-rps are {rates}; allowed: 0 and more, not all 0")

    def constant(self) -> Work:
        """The same number of conversations, at one rate throughout."""
        return dataclasses.replace(self, short_rps=_mean_rate(self.short_rps), long_rps=_mean_rate(self.long_rps))

    def describe(self) -> dict[str, Any]:
        of_rates = {name: getattr(self, name) for name in ("duration_s", "short_rps", "long_rps", "turns", "think_s")}
        if self.dataset is not None:
            lengths = self.dataset.label
        elif self.short_tokens is not None:
            lengths = f"shorts of {self.short_tokens[0]} to {self.short_tokens[1]} tokens"
        else:
            lengths = "drawn from a model of lengths"
        return of_rates | {"lengths": lengths}

    def recorded_trace(self, dataset: Dataset, rng: random.Random) -> Trace:
        """As ``trace``. A conversation ends where its prompt would be longer than the longest of a drawn one."""
        rows = []
        for is_short, rates in ((True, self.short_rps), (False, self.long_rps)):
            begins_s = self._begin(rng, rates)
            talks = dataset.draw_prompts(len(begins_s), rng, BOUNDARY_TOKENS, is_short=is_short, answer=OUTPUT_TOKENS)
            for number, (at_s, prompts) in enumerate(zip(begins_s, talks, strict=True)):
                due_s = itertools.accumulate(
                    prompts[1:], lambda due, _: due + rng.expovariate(1 / self.think_s), initial=at_s
                )
                kept = zip(due_s, prompts, strict=True)
                session = 2 * number + is_short
                rows += [
                    (due, session, tokens) for due, tokens in kept if due < self.duration_s and tokens <= LONG_TOKENS[1]
                ]
        arrivals_s, sessions, lengths = zip(*sorted(rows), strict=True)
        return _make_trace("recorded conversations", arrivals_s, lengths, sessions)

    def trace(self, seed: int) -> Trace:
        """Poisson beginnings of both classes; the same each time for a seed."""
        rng = random.Random(seed)
        if self.dataset is not None:
            return self.recorded_trace(self.dataset, rng)
        first = [(at_s, self._draw_short(rng)) for at_s in self._begin(rng, self.short_rps)]
        first += [(at_s, rng.randint(*LONG_TOKENS)) for at_s in self._begin(rng, self.long_rps)]
        rows = []
        for session, (at_s, tokens) in enumerate(first):
            rows.append((at_s, session, tokens))
            while (
                rng.random() >= 1 / self.turns and (at_s := at_s + rng.expovariate(1 / self.think_s)) < self.duration_s
            ):
                tokens += OUTPUT_TOKENS + self._draw_short(rng)
                rows.append((at_s, session, tokens))
        arrivals_s, sessions, lengths = zip(*sorted(rows), strict=True)
        return _make_trace("chat and longs", arrivals_s, lengths, sessions)

    def planned(self, seed: int, time_scale: float) -> list[Planned]:
        return plan(self.trace(seed).require_requests(), seed=seed, time_scale=time_scale, sessions=True)

    def _draw_short(self, rng: random.Random) -> int:
        return _draw_short(rng) if self.short_tokens is None else rng.randint(*self.short_tokens)

    def _begin(self, rng: random.Random, rates: Sequence[float]) -> list[float]:
        part_s = self.duration_s / len(rates)
        return [
            part * part_s + at_s
            for part, rate in enumerate(rates)
            for at_s in poisson_arrivals(rng, rate_per_s=rate, duration_s=part_s)
        ]


def _mean_rate(rates: Sequence[float]) -> tuple[float, ...]:
    return (sum(rates) / len(rates),)


# Asks for the long pool, then for the short one, then for the long one. Large shorts: a pool of one instance is to be
# too small for them at a rate that the hosts of a small machine can bear.
SHIFTING_WORK = Work(36.0, (10.0, 120.0, 10.0), (30.0, 1.0, 30.0), short_tokens=(400, SHORT_MAX_TOKENS))


def warm_up(seed: int) -> list[Planned]:
    """A few requests of each class, for the step models; their prompts are none of the run's."""
    rng = random.Random(f"warm-up-{seed}")
    lengths = [_draw_short(rng) for _ in range(WARM_UP_SHORTS)]
    lengths += [rng.randint(*LONG_TOKENS) for _ in range(WARM_UP_LONGS)]
    trace = _make_trace("warm-up", np.linspace(0.0, 3.0, len(lengths)), lengths)
    return plan(trace, seed=rng.randrange(1 << 30))


def _make_trace(name: str, arrivals_s: Any, lengths: Sequence[int], sessions: Sequence[int] | None = None) -> Trace:
    outputs = np.full(len(lengths), OUTPUT_TOKENS, dtype=np.int64)
    session = None if sessions is None else np.array(sessions, dtype=np.int64)
    return Trace(name, np.array(arrivals_s), np.array(lengths, dtype=np.int64), outputs, session=session)


def _draw_short(rng: random.Random) -> int:
    return min(SHORT_MAX_TOKENS, max(8, round(SHORT_MEDIAN_TOKENS * rng.lognormvariate(0.0, SHORT_SIGMA))))


# -- one step of an arm ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Engines:
    """Of one or more arms, running. One step at a time, each on engines that have forgotten the last."""

    described: Mapping[str, Any]  # the cluster's state file
    setting: Setting
    telemetry: str
    folder: Path  # of logs

    def run_step(self, name: str, arm: str, planned: list[Planned], *, seed: int) -> Row:
        """What came of every request; ``name``: of the router's log. Raises ServerError, ConfigError."""
        for engine in self.described["instances"]:
            servers.flush_cache(engine["url"])
            if is_ours(arm) and engine["kind"] == "prefill":
                fetch(f"{engine['url']}/pla/role", {"role": "mixed"})  # no class left from an arm before
        router = router_of(arm, self.setting, self.telemetry)
        with contextlib.ExitStack() as stack:
            url = self.described["instances"][0]["url"]
            if router is not None:
                log = self.folder / f"{name}.router.log"
                url = stack.enter_context(servers.running_router(router, self.described, log))
            replay(url, warm_up(seed), timeout_s=REQUEST_TIMEOUT_S, body=text_body)
            before = servers.read_devices(self.described)
            say(f"{name}: {len(planned)} requests over {planned[-1].at_s:.0f} s")
            began_s = time.monotonic() + START_DELAY_S
            records = replay(url, planned, timeout_s=REQUEST_TIMEOUT_S, body=text_body)
            state = read_own_state(arm, url, self.described, self.setting, began_s)
            return row_of(records, before, servers.read_devices(self.described), self.setting.time_scale) | state


@contextlib.contextmanager
def running_engines(arm: str, setting: Setting, folder: Path, name: str) -> Iterator[Engines]:
    """Those that ``arm`` needs. Raises ServerError, ConfigError."""
    telemetry = f"tcp://127.0.0.1:{free_port()}"
    with servers.running_cluster(engine_arguments(arm, setting, telemetry), folder, name) as described:
        yield Engines(described, setting, telemetry, folder)


def row_of(
    records: Sequence[Record],
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    time_scale: float,
) -> Row:
    """Of one arm. Requests are [new tokens, due time, TTFT or None] in device time; a failed one has no TTFT.

    New tokens of a later turn are those after the earlier prompt and answer. Computed ones are no prefix cache's.
    """
    ttft_s = served(records, time_scale).ttft_s()
    errors = [record.error for record in records if record.error is not None]
    finished = [record for record in records if record.error is None]
    say_errors(records, SHOWN_ERRORS)
    return {
        "requests": [
            [
                len(record.planned.own_ids),
                record.due_s / time_scale,
                None if record.error or np.isnan(ttft) else float(ttft),
            ]
            for record, ttft in zip(records, ttft_s, strict=True)
        ],
        "failed": len(errors),
        "prompt_tokens": sum(len(record.prompt_ids) for record in finished),
        "computed_tokens": sum(len(record.prompt_ids) - int(record.meta["cached_tokens"]) for record in finished),
        "errors": errors[:SHOWN_ERRORS],
        "tokens_verified": sum(len(record.output_ids) for record in finished),
        "tokens_wrong": sum(count_wrong(record) for record in finished),
        "client_lag_p99_s": quantile(lag_s(records) / time_scale, 99),
        "host_overhead_by_instance": {name: servers.host_overhead_share(before[name], after[name]) for name in after},
        "sglang": next(iter(after.values()))["version"],
        "plugin_commit": environment()["plugin_commit"],
    }


def read_own_state(arm: str, url: str, described: Mapping[str, Any], setting: Setting, began_s: float) -> Row:
    """What our scheduling says of itself: hooks, dispatches, ticks, and moves since ``began_s`` (monotonic clock)."""
    if not is_ours(arm):
        return {"hooks": None, "pools": None}
    state = fetch(f"{described['instances'][0]['url']}/pla/state")
    hooks = state["schedulers"][0]["hooks"]
    if setting.layout == PAIRS:
        state = fetch(f"{url}/pla/state")
        ticks = {name: count for name, count in state["actions"].items() if name.startswith("Hold:")}
        pools = {"dispatched": state["decisions"], "ticks": ticks, "last_moves": state["last_moves"]}
    elif arm == SPATIAL:
        pools = state["pools"]
    else:
        return {"hooks": hooks, "pools": None}
    return {"hooks": hooks, "pools": pools_of(pools, time.monotonic() - began_s, setting.time_scale)}


def pools_of(state: Mapping[str, Any], began_s_ago: float, time_scale: float) -> Row:
    """``began_s_ago``: seconds of this clock since the run began; moves before that were the warm-up's."""
    moves = [move for move in state["last_moves"] if move["ago_s"] <= began_s_ago]
    return {
        "moves": [
            {
                "at_s": round((began_s_ago - move["ago_s"]) / time_scale, 2),
                **{name: move[name] for name in ("instance", "rank", "role", "reason") if name in move},
            }
            for move in moves
        ],
        "dispatched": state["dispatched"],
        "ticks": state["ticks"],
    }
