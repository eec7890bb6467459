"""What can be read off the control plane at a moment: gauges for Prometheus, and /pla/state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pla_sglang.policy.fleet import InstanceKind, InstanceView
from pla_sglang.policy.pla.steady import SteadyPressure
from pla_sglang.policy.types import PrefillClass
from pla_sglang.router.control.desk import Desk
from pla_sglang.router.control.workers import WorkerState

Gauge = tuple[str, str, dict[str, str], float]


def gauges(desk: Desk, now_s: float) -> Iterator[Gauge]:
    """Name without prefix, help, labels, value."""
    yield "open_requests", "Requests that have not ended.", {}, float(desk.ledger.live)
    yield "queued_requests", "Requests that wait in the router for an instance.", {}, float(len(desk.queue))
    yield "rooms", "KV rooms that instances may still use.", {}, float(len(desk.ledger.rooms))
    states = Counter(worker.state for worker in desk.table)
    for state in WorkerState:
        if state is not WorkerState.DEAD:
            yield "workers", "Instances by state.", {"state": state.value}, float(states[state])
    yield from _of_workers(desk, now_s)
    yield from _of_predictions(desk)
    yield from _of_pools(desk)
    if desk.driver is not None:
        yield "flips", "Instances moved between roles or pools since the start.", {}, float(desk.driver.flips)


def _of_workers(desk: Desk, now_s: float) -> Iterator[Gauge]:
    for worker in desk.table:
        labels, view = {"worker": worker.view.name}, worker.view
        yield "worker_requests", "This router's requests there.", labels, float(worker.book.open_requests())
        yield "worker_queued_tokens", "Prompt tokens to compute there.", labels, float(view.queued_tokens)
        yield "worker_decode_tokens", "KV tokens that decode there or will.", labels, float(view.decode_tokens())
        yield "worker_utilisation", "Busy share of a recent window.", labels, view.utilisation
        for kind, count in worker.errors().items():
            yield "worker_errors", "Requests that ended badly there since its start.", {**labels, "kind": kind}, count
        if worker.book.reported_s is not None:
            age_s = now_s - worker.book.reported_s
            yield "worker_report_age_seconds", "Since its last load report or poll.", labels, age_s


def _of_predictions(desk: Desk) -> Iterator[Gauge]:
    correction = desk.admission.correction
    yield "ttft_correction", "Median of observed over predicted TTFT.", {}, correction.quantile(0.5)
    yield "bytes_per_token", "Learned from tokenized prompts.", {}, desk.prompts.bytes_per_token
    if desk.predictor is not None:
        error = desk.predictor.error
        yield "ttft_prediction_error", "Mean absolute error over actual TTFT.", {}, error.relative


def _of_pools(desk: Desk) -> Iterator[Gauge]:
    found = _pools(desk)
    if found is None:
        return
    controller, pools = found
    for length_class, members in pools.items():
        labels = {"pool": length_class.value}
        yield "pool_instances", "Ready prefill instances in each pool.", labels, float(len(members))
        yield "pool_pressure", "P of PLA-Serve's Algorithm 2.", labels, controller.pool_pressure(members)
        for one in members:
            for signal, value in controller.signals(one)._asdict().items():
                of_one = {"worker": one.name, "signal": signal}
                yield "pool_signal", "q, e, u and psi of PLA-Serve's Algorithm 2.", of_one, value


def state_of(desk: Desk, now_s: float) -> dict[str, Any]:
    """For /pla/state."""
    driver = desk.driver
    pools: dict[str, list[str]] = {"short": [], "long": [], "both": []}
    for worker in desk.table:
        if worker.is_ready() and worker.view.kind is not InstanceKind.DECODE:
            length_class = worker.view.length_class
            pools["both" if length_class is None else length_class.value].append(worker.view.name)
    return {
        "policy": desk.knobs.policy,
        "decisions": {} if driver is None else {reason.value: count for reason, count in driver.decisions.items()},
        "actions": {} if driver is None else dict(driver.actions),
        "flips": 0 if driver is None else driver.flips,
        "last_moves": [] if driver is None else [move.to_dict(now_s) for move in driver.moves],
        "pools": pools if desk.table.pools else None,
        "pressure": _pressure(desk),
        "open_requests": desk.ledger.live,
        "queued_requests": len(desk.queue),
        "ttft_correction": desk.admission.correction.quantile(0.5),
        "prompts": {
            "tokenized": desk.prompts.tokenized,
            "estimated": desk.prompts.estimated,
            "cache_hits": desk.prompts.hits,
            "bytes_per_token": desk.prompts.bytes_per_token,
            "prefix_blocks": desk.index.size(),
        },
        "workers": [worker.to_dict(now_s) for worker in desk.table],
    }


def _pools(desk: Desk) -> tuple[SteadyPressure, dict[PrefillClass, list[InstanceView]]] | None:
    """The pool-pressure controller and the ready members of each pool, where there is one."""
    controllers = () if desk.driver is None else desk.driver.policy.controllers
    for controller in controllers:
        if isinstance(controller, SteadyPressure):
            members = desk.table.fleet.prefill_capable()
            return controller, {kind: [one for one in members if one.length_class is kind] for kind in PrefillClass}
    return None


def _pressure(desk: Desk) -> dict[str, Any] | None:
    """Pressures, signals and knobs of PLA-Serve's Algorithm 2."""
    found = _pools(desk)
    if found is None:
        return None
    controller, pools = found
    return {
        **{kind.value: controller.pool_pressure(members) for kind, members in pools.items()},
        "by_instance": {one.name: controller.signals(one)._asdict() for pool in pools.values() for one in pool},
        "knobs": dataclasses.asdict(controller.knobs),
    }
