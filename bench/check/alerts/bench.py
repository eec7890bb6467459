"""Every alert rule for real: something breaks, a Prometheus fires the alert; it is mended, and the alert clears.

    python -m bench alerts

Emulated stateless engines behind our router, and a Prometheus that scrapes all of them every second, with the rules of
``examples/grafana/alerts.yaml``. Every ``for`` and every window there is divided by ``--factor``, bounds stay. Under a
light load the scenes run one after the other (``causes.py``): each lasts until its alerts fire, and an alert has to
clear once the scene is over. While something is wrong, and in the end, every query of the dashboard and the expression
of every rule is asked that has had no answer yet. A rule may fire for several conditions (what ``or`` joins), each of
which Prometheus has as a rule ``RULE.1``, ``RULE.2`` besides.

``rules``: that there are; ``provoked``: that have a scene; ``fired``, ``cleared``: how many did. ``conditions``: that
rules with several have; ``met``: those that have fired and cleared by themselves. ``queries``: that were asked;
``empty``: of those, never answered, but for those that ``EMPTY`` gives a reason for. ``alerts``: by rule and condition
the scene, and seconds from its beginning until it fired, and from its end until it cleared. The exit status is 1 where
one of them has not fired or not cleared, or a query has no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from bench.check.alerts import causes
from bench.check.alerts.causes import Load, RestartedRouter, Site
from bench.check.faults.fleet import Fleet
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import LiveFleet, running_fleet
from bench.harness.prometheus import (
    Prometheus,
    list_conditions,
    list_queries,
    read_rules,
    require_program,
    running_prometheus,
    shorten_rules,
)
from bench.harness.steps import Row
from pla_sglang.common.checks import require
from pla_sglang.fleet.cluster.ports import free_port

FIRE_S, CLEAR_S = 60.0, 120.0  # of real time, at most
LOOK_S = 0.5
WARM_S = 5.0  # a few scrapes of all, before anything happens
WINDOW = "15s"  # of the dashboard's rates
MOST_FACTOR = 75.0  # the shortest window of a rule is 5 m, and has to hold a few scrapes
SETTINGS = ("instances", "rate", "factor", "kv_failures", "policy", "profile", "time_scale", "seed")
# Queries of the dashboard that have no answer here, by their panel and why.
EMPTY = {
    "Changes of roles and pools": "the policy sets no roles",
    "Prefill batches by graph": "emulated engines have no CUDA graphs",
}
# Conditions without a scene.
NOT_PROVOKED = dict.fromkeys(
    ("TransfersFail.1", "TransfersFail.2"),
    "nothing from outside ends a thread of a live engine, or makes our code there raise; tests/bench/test_alerts.py has"
    " instances that say so",
)
UNMET = "it has not fired, or not cleared"
Options = argparse.Namespace


@dataclasses.dataclass(frozen=True)
class Scene:
    """``cause``: a block in which something is wrong that makes ``alerts`` fire: rules, or conditions of theirs."""

    name: str
    alerts: tuple[str, ...]
    cause: Callable[[Site], contextlib.AbstractAsyncContextManager[None]]


SCENES = (
    # The first one: its longest window, six hours, has all requests since the beginning.
    Scene(
        "one request in eight has targets that nobody meets",
        ("TtftTargetsMissed.2", "TpotTargetsMissed.2"),
        causes.promised_a_little_too_much,
    ),
    Scene("an instance gets SIGKILL twice", ("InstanceDown", "InstanceLostAgain"), causes.killed_twice),
    Scene(
        "targets that nobody meets, lengths that are wrong",
        ("TtftTargetsMissed.1", "TpotTargetsMissed.1", "LengthsPredictedBadly"),
        causes.promised_too_much,
    ),
    Scene("an instance is frozen", ("InstanceSuspect.1", "InstanceSuspect.2"), causes.frozen),
    Scene("servers stutter", ("PredictionsWrong",), causes.stuttering),
    Scene("caches are emptied", ("PrefixHitsWrong",), causes.flushed),
    Scene("drains over links that lose KV", ("MigrationsFail", "TransfersFail.3"), causes.drained_in_turns),
    Scene(
        "all instances are drained", ("NoInstanceReady", "RequestsWaitInTheRouter", "RequestsFail"), causes.all_drained
    ),
    Scene("the router is gone", ("RouterAway.1", "RouterAway.2"), causes.router_gone),
    Scene("the router gets SIGKILL twice", ("RouterAway.3",), causes.router_killed_twice),
    Scene("nobody takes a planner's orders", ("InstanceStartsFail.2",), causes.actuator_away),
    Scene("instances that a planner starts are killed", ("InstanceStartsFail.1",), causes.planned_in_vain),
)


class Watch:
    """What fires, looked at every ``LOOK_S``. Times are of ``time.monotonic``."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._looks: list[tuple[float, set[str]]] = []

    async def run(self) -> None:
        while True:
            firing = await asyncio.to_thread(self._prometheus.list_firing)
            self._looks.append((time.monotonic(), firing))
            await asyncio.sleep(LOOK_S)

    def find(self, alert: str, since_s: float, *, fires: bool) -> float | None:
        """Seconds from ``since_s`` on until it first fired, or did not; None: it has not come to that."""
        return next((at_s - since_s for at_s, seen in self._looks if at_s > since_s and (alert in seen) == fires), None)

    async def wait(self, alerts: Sequence[str], since_s: float, limit_s: float, *, fires: bool) -> None:
        """Until all were so since then, or the time is over."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if all(self.find(alert, since_s, fires=fires) is not None for alert in alerts):
                return
            await asyncio.sleep(LOOK_S)


class Questions:
    """Queries that have had no answer yet: what some count is there only once it has happened."""

    def __init__(self, prometheus: Prometheus, factor: float) -> None:
        self._prometheus = prometheus
        self.open = list_queries(WINDOW, factor)
        self.count = len(self.open)

    async def ask(self) -> None:
        self.open = await asyncio.to_thread(self._prometheus.list_empty, self.open)


def list_alerts(scene: Scene) -> list[str]:
    """The rules too that its conditions belong to."""
    rules = {alert.partition(".")[0]: None for alert in scene.alerts}
    return [*rules, *(alert for alert in scene.alerts if alert not in rules)]


async def play(site: Site, watch: Watch, questions: Questions) -> dict[str, Row]:
    """All scenes; by alert what it did. An alert that one scene has left firing clears while the next ones run.

    Of a rule that several scenes make fire, the last one counts.
    """
    found: dict[str, Row] = {}
    ended_s: dict[str, float] = {}
    for scene in SCENES:
        alerts = list_alerts(scene)
        await watch.wait(alerts, time.monotonic(), CLEAR_S, fires=False)
        begun_s = time.monotonic()
        async with scene.cause(site):
            await watch.wait(alerts, begun_s, FIRE_S, fires=True)
            await questions.ask()
        for alert in alerts:
            found[alert] = {"scene": scene.name, "fired_s": watch.find(alert, begun_s, fires=True)}
            ended_s[alert] = time.monotonic()
        fired = ", ".join(f"{alert} after {report.number(found[alert]['fired_s'])} s" for alert in alerts)
        report.say(f"{scene.name}: {fired}")
    for alert, row in found.items():
        await watch.wait([alert], ended_s[alert], CLEAR_S, fires=False)
        row["cleared_s"] = watch.find(alert, ended_s[alert], fires=False)
    await questions.ask()
    return found


@contextlib.asynccontextmanager
async def running_beside(*work: Any) -> AsyncIterator[None]:
    """Coroutines that run until the block ends; what one of them raises ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def measure(site: Site, prometheus: Prometheus, factor: float) -> Row:
    watch, questions = Watch(prometheus), Questions(prometheus, factor)
    async with running_beside(site.load.run(), watch.run()):
        await asyncio.sleep(WARM_S)
        alerts = await play(site, watch, questions)
    return sum_up(alerts, questions.count, [query.where for query in questions.open]) | {
        "broken_rules": prometheus.list_broken_rules()
    }


def sum_up(alerts: dict[str, Row], queries: int, empty: Sequence[str]) -> Row:
    names, conditions = ([rule["alert"] for rule in found] for found in (read_rules(), list_conditions()))
    excused = {where: EMPTY[panel] for where in empty if (panel := where.partition(":")[0]) in EMPTY}
    fired = {alert for alert, row in alerts.items() if row["fired_s"] is not None}
    cleared = {alert for alert in fired if alerts[alert]["cleared_s"] is not None}
    return {
        "rules": len(names),
        "provoked": len(alerts.keys() & set(names)),
        "fired": len(fired & set(names)),
        "cleared": len(cleared & set(names)),
        "conditions": len(conditions),
        "met": len(cleared & set(conditions)),
        "unmet": {name: NOT_PROVOKED.get(name, UNMET) for name in conditions if name not in cleared},
        "queries": queries,
        "empty": len(empty) - len(excused),
        "empty_queries": [where for where in empty if where not in excused],
        "empty_for_a_reason": excused,
        "not_provoked": [name for name in names if name not in alerts],
        "alerts": alerts,
    }


# -- processes ---------------------------------------------------------------------------------------------------------


def router_flags(fleet: LiveFleet) -> tuple[str, ...]:
    """Targets that a healthy fleet meets; a request that finds no instance is refused soon."""
    return (
        *("--telemetry", fleet.telemetry, "--migration", "on", "--lengths", "stated", "--move-gain", "100"),
        *("--slo-ttft-ms", "20000", "--slo-tpot-ms", "2000", "--pending-timeout-ms", "4000"),
    )


@contextlib.contextmanager
def running_router(fleet: LiveFleet, options: Options) -> Any:
    """Yields the router, whose instances are connected. Raises ServerError."""
    port = free_port()
    router = servers.Router("pla", options.policy, router_flags(fleet))
    command = servers.router_command(router, fleet.described, port)
    made = RestartedRouter(command, f"http://127.0.0.1:{port}", options.out / "alerts.router.log")
    try:
        made.start()
        servers.wait_until_paired(made.url)
        yield made
    finally:
        made.stop()


def run_scenes(options: Options) -> Row:
    """Raises ConfigError, ServerError, PlaError, TimeoutError."""
    flags = ["--stateless", str(options.instances), "--prefill-disagg", "temporal", "--enable-metrics"]
    flags += ["--pla-emulate-kv-failures", f"{options.kv_failures:g}"]
    with (
        running_fleet("alerts", flags, options, timeout_s=causes.REQUEST_S) as fleet,
        running_router(fleet, options) as router,
    ):
        engines = [one["url"].removeprefix("http://") for one in fleet.described["instances"]]
        targets = {"router": [router.url.removeprefix("http://")], "engines": engines}
        described = fleet.described | {"url": router.url}
        site = Site(
            Fleet(described, options.out / "alerts.state.json"),
            router,
            Load(router.url, options.rate, options.seed),
        )
        rules = shorten_rules(options.factor)
        with running_prometheus(options.prometheus, targets, rules, options.out / "alerts") as prometheus:
            try:
                return asyncio.run(measure(site, prometheus, options.factor))
            except ExceptionGroup as errors:  # of tasks beside the scenes, and of those in them
                raise find_first(errors) from None


def find_first(error: Exception) -> Exception:
    return find_first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


# -- result ------------------------------------------------------------------------------------------------------------


def is_right(result: Result) -> bool:
    whole = result["rules"] == result["provoked"] == result["fired"] == result["cleared"]
    return whole and not result["unmet"].keys() - NOT_PROVOKED and not result["empty"] and not result["broken_rules"]


def table(result: Result) -> report.Cells:
    rows = [
        [f"`{alert}`", row["scene"], *(report.number(row[name]) for name in ("fired_s", "cleared_s"))]
        for alert, row in result["alerts"].items()
    ]
    return ["alert", "what is done", "fires, s", "clears, s"], rows


def page(result: Result) -> str:
    counts = f"{result['rules']} rules, {result['provoked']} provoked, {result['fired']} fired, {result['cleared']}"
    counts += f" cleared. {result['conditions']} conditions of rules with several, {result['met']} fired and cleared."
    counts += f" {result['queries']} queries, {result['empty']} empty"
    reasons = [f"- not provoked: `{where}` ({why})" for where, why in result["unmet"].items()]
    reasons += [f"- not counted: {where} ({why})" for where, why in result["empty_for_a_reason"].items()]
    if reasons:
        counts = "\n".join([f"{counts}:\n", *reasons])
    where = f"{result['instances']} stateless engines, policy `{result['policy']}`, spans of rules divided by"
    where += f" {result['factor']:g}"
    return "\n\n".join([*_tell_alerts(result), counts, f"{where} · {report.device_conditions(result)}"])


def _tell_alerts(result: Result) -> Iterator[str]:
    """Between which times alerts fired and cleared, and a table of those that did not."""
    header, rows = table(result)
    if silent := [row for row in rows if "-" in row[2:]]:
        yield report.markdown(header, silent)
    found = [row for row in result["alerts"].values() if None not in (row["fired_s"], row["cleared_s"])]
    if found:
        ends = [
            report.number(end(row[name] for row in found)) for name in ("fired_s", "cleared_s") for end in (min, max)
        ]
        yield "{} to {} s after a scene began its alerts fired, and {} to {} s after its end they cleared.".format(
            *ends
        )


PAGES = {"alerts": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=3, help="engines, at least 2")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s")
    parser.add_argument("--factor", type=float, default=60.0, help="by which spans of the rules are shortened")
    parser.add_argument("--kv-failures", type=float, default=0.5, help="share of KV transfers that fail")
    parser.add_argument("--policy", default="combined")
    parser.add_argument("--prometheus", default="prometheus", metavar="PROGRAM", help="name or path")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, PlaError, TimeoutError."""
    require("--instances", options.instances, 2)
    require("--rate", options.rate, 0, above=True)
    require("--factor", options.factor, 1, MOST_FACTOR)
    require("--kv-failures", options.kv_failures, 0, 1, above=True)
    require_program(options.prometheus)
    about = report.environment()
    result: Row = {"bench": "alerts", **{name: getattr(options, name) for name in SETTINGS}}
    with measuring():
        result |= run_scenes(options)
    result["environment"] = about
    report.show("Alerts", *table(result))
    report.emit(result, "alerts", options.out)
    return 0 if is_right(result) else 1
