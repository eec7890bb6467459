"""What can be read off the control plane at a moment: gauges for Prometheus, and /pla/state."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from pla_sglang.fleet.router.control.migration import Migration
from pla_sglang.fleet.router.control.observability.series import Row
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.scale_orders import ScaleOrders
from pla_sglang.fleet.router.control.workers.table import SHOWN_STATES, Worker, WorkerReason
from pla_sglang.fleet.router.http.bodies import WorkerRow
from pla_sglang.fleet.viewer.history import NO_REQUESTS
from pla_sglang.load.legs import LegLoad
from pla_sglang.policy.dopd.planner import DopdController
from pla_sglang.policy.interface.fleet import InstanceKind, InstanceView
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.pla.averaged_pressure import AveragedPressure
from pla_sglang.policy.pla.spatial import SpatialDispatcher
from pla_sglang.policy.runner import FleetRunner

LOSSES = (WorkerReason.RESTARTED, WorkerReason.NO_ANSWER)  # why a process is gone that nobody has removed


def gauges(dispatcher: RequestDispatcher, scaling: ScaleOrders, now_s: float) -> Iterator[Row]:
    yield "open_requests", "Requests that have not ended.", {}, float(dispatcher.ledger.live)
    yield "queued_requests", "Requests that wait in the router for an instance.", {}, float(len(dispatcher.queue))
    budget = dispatcher.retry_budget.left(now_s)
    yield "retry_budget_left", "Refused requests that may be sent to another instance now.", {}, budget
    for tenant, left_s in dispatcher.limits.find_left_s(dispatcher.policy.clock.device_s(now_s)):
        text = "Prefill time that a tenant may use now, in device seconds; below 0: a debt."
        yield "tenant_limit_left_seconds", text, {"tenant": tenant}, left_s
    yield "transfer_ids", "Transfer ids that instances may still use.", {}, float(len(dispatcher.ledger.rooms))
    states = Counter(worker.shown_state for worker in dispatcher.table)
    for state in SHOWN_STATES:
        yield "workers", "Instances by state.", {"state": state}, float(states[state])
    yield from _of_workers(dispatcher, now_s)
    yield from _of_predictions(dispatcher)
    yield from _of_backlogs(dispatcher)
    yield from _of_pools(dispatcher)
    yield from _of_moves(dispatcher)
    yield from _of_planner(dispatcher.policy.runner, scaling, now_s)
    if dispatcher.policy.runner is not None:
        yield (
            "role_switches",
            "Instances moved between roles or pools since the start.",
            {},
            float(dispatcher.policy.runner.moved.total()),
        )


def name_pool(view: InstanceView) -> str:
    """The name of a pool, which takes prompts by length."""
    return "both" if view.length_class is None else view.length_class.value


def _of_workers(dispatcher: RequestDispatcher, now_s: float) -> Iterator[Row]:
    lost = Counter(worker.view.name for worker in dispatcher.table.workers if worker.reason in LOSSES)
    for worker in dispatcher.table:
        labels, view = {"worker": worker.view.name}, worker.view
        yield "worker_losses", "Processes lost at this address since the start.", labels, float(lost[view.name])
        yield "worker_requests", "This router's requests there.", labels, float(worker.load.open_requests())
        yield "worker_queued_tokens", "Prompt tokens to compute there.", labels, float(view.queued_tokens)
        decode_tokens = float(view.assigned_decode_tokens())
        yield "worker_decode_tokens", "KV tokens that decode there or will.", labels, decode_tokens
        yield "worker_utilisation", "Busy share of a recent window.", labels, view.utilisation
        for state, peers in Counter(state.partition(":")[0] for state in (worker.peers or {}).values()).items():
            yield "worker_peers", "Peers of a stateless instance, by state.", {**labels, "state": state}, float(peers)
        if worker.legs is not None:
            yield from _of_legs(labels, worker.legs)
        yield "worker_kv_used_tokens", "KV tokens there that are not evictable.", labels, float(view.kv_used_tokens)
        yield (
            "worker_kv_cached_tokens",
            "KV tokens there that can be evicted, estimated.",
            labels,
            view.kv_cached_tokens,
        )
        if worker.description is not None:
            yield "worker_kv_capacity_tokens", "KV tokens that fit there.", labels, float(view.kv_capacity_tokens)
        where = {"role": view.role.value, "pool": name_pool(view), "state": worker.shown_state}
        yield "worker_role", "1: where it belongs now.", {**labels, **where}, 1.0
        yield "worker_role_epoch", "How often its role was set.", labels, float(view.role_epoch)
        for kind, count in worker.errors().items():
            yield "worker_errors", "Requests that ended badly there since its start.", {**labels, "kind": kind}, count
        if worker.load.reported_s is not None:
            age_s = now_s - worker.load.reported_s
            yield "worker_report_age_seconds", "Since its last load report or poll.", labels, age_s


def _of_legs(labels: dict[str, str], legs: LegLoad) -> Iterator[Row]:
    """Gauges of one stateless instance."""
    for end, states in (("sending", legs.sending), ("receiving", legs.receiving)):
        for state, count in states.items():
            yield "worker_transfers", "Parts there, by state.", {**labels, "end": end, "state": state}, float(count)
    for holder, tokens in legs.kv_tokens.items():
        text = "KV tokens of transfers there beside the batches."
        yield "worker_transfer_kv_tokens", text, {**labels, "holder": holder}, float(tokens)
    yield "worker_pinned_requests", "Given up; a transfer may touch their pages.", labels, float(legs.quarantined)
    yield "worker_transfers_refused", "Refused as parts there since its start.", labels, float(legs.refused)
    yield "worker_transfer_ready", "1: it can hand over KV; 0: start it again.", labels, float(legs.ready)
    yield "worker_transfer_faults", "Exceptions of our own code there since its start.", labels, float(legs.faults)


def _of_moves(dispatcher: RequestDispatcher) -> Iterator[Row]:
    """Where the policy moves running requests."""
    policy = dispatcher.policy
    if not policy.moves_requests:
        return
    resting = float(policy.orders.count_cooling_down())
    yield "cooling_down_requests", "Requests in their migration cool-down.", {}, resting
    for worker in dispatcher.table:
        age_s = policy.running.rows_age_s(worker)
        if age_s is not None:
            labels, rows = {"worker": worker.view.name}, sum(len(rows) for _, rows in worker.rows.values())
            yield "worker_request_rows", "Running requests that it has listed.", labels, float(rows)
            yield "worker_request_rows_age_seconds", "Since it has listed its running requests.", labels, age_s


def _of_planner(runner: FleetRunner | None, scaling: ScaleOrders, now_s: float) -> Iterator[Row]:
    """How many instances the planner wants, for what load, and what they have cost."""
    if not scaling.knobs.plans:
        return
    for role, count in scaling.wanted.items():
        text = "Instances that the planner wants, by role; mixed: in all."
        yield "planned_instances", text, {"role": role.value}, float(count)
    for controller in () if runner is None else runner.policy.controllers:
        if isinstance(controller, DopdController) and controller.last_plan is not None:
            expected = controller.last_plan.load.concurrency
            yield "planned_requests", "Requests at once that the planner expects.", {}, expected
    plan = scaling.log.last_plan
    for figure, (load, forecast, _) in () if plan is None else plan.look.items():
        labels = {"figure": figure}
        if load is not None:
            yield "plan_load", "Load of the last interval, as the planner saw it.", labels, load
        if forecast is not None:
            yield "plan_forecast", "Load that the planner expects, before headroom.", labels, forecast
    yield "gpu_hours", "GPU-hours of all instances since the start of this router.", {}, scaling.count_gpus(now_s)


def _of_predictions(dispatcher: RequestDispatcher) -> Iterator[Row]:
    correction = dispatcher.admission.correction
    yield "ttft_correction", "Median of observed over predicted TTFT.", {}, correction.quantile(0.5)
    yield "bytes_per_token", "Learned from tokenized prompts.", {}, dispatcher.prompts.bytes_per_token
    if dispatcher.policy.predictor is not None:
        error = dispatcher.policy.predictor.error
        yield "ttft_prediction_error", "Mean absolute error over actual TTFT.", {}, error.relative


def _of_backlogs(dispatcher: RequestDispatcher) -> Iterator[Row]:
    """By what the ready instances that get prefills are used for. Of a role without one there is no row: that it has no
    backlog would not be true."""
    policy, backlogs = dispatcher.policy, defaultdict[tuple[str, str], list[float]](list)
    if policy.predictor is None:
        return
    for view in dispatcher.table.fleet.prefill_capable():
        backlogs[view.role.value, name_pool(view)].append(policy.clock.wall_s(policy.predictor.delay_s(view)))
    for (role, pool), seconds in backlogs.items():
        labels = {"role": role, "pool": pool}
        text = "Predicted time of the unfinished prefills of ready instances, summed."
        yield "prefill_backlog_seconds", text, labels, sum(seconds)
        text = "Of the instance that has most of it: what a prefill waits there."
        yield "prefill_backlog_max_seconds", text, labels, max(seconds)


def _of_pools(dispatcher: RequestDispatcher) -> Iterator[Row]:
    found = _pools(dispatcher)
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


def row_of(worker: Worker, dispatcher: RequestDispatcher, now_s: float) -> WorkerRow:
    """For /workers and /pla/state."""
    ttft = dispatcher.series.worker_ttft.get(worker.view.name, NO_REQUESTS)
    return worker.to_row(now_s, ttft, dispatcher.policy.describe_steps(worker.view))


def state_of(dispatcher: RequestDispatcher, migration: Migration, now_s: float) -> dict[str, Any]:
    """For /pla/state."""
    driver = dispatcher.policy.runner
    pools: dict[str, list[str]] = {"short": [], "long": [], "both": []}
    for worker in dispatcher.table:
        if worker.is_ready() and worker.view.kind is not InstanceKind.DECODE:
            pools[name_pool(worker.view)].append(worker.view.name)
    return {
        "policy": dispatcher.knobs.policy,
        "policy_knobs": list(dispatcher.knobs.policy_knobs),
        "decisions": {} if driver is None else {reason.value: count for reason, count in driver.decisions.items()},
        "actions": {} if driver is None else dict(driver.actions),
        "flips": 0 if driver is None else driver.moved.total(),
        "last_moves": [] if driver is None else [move.to_dict(now_s) for move in driver.moves],
        "roles": _roles(dispatcher),
        "refusals": {} if driver is None else {why.value: count for why, count in driver.refusals.items()},
        "pools": pools if dispatcher.table.pools else None,
        "pressure": _pressure(dispatcher),
        "boundary": _boundary(dispatcher),
        "moves": _moves(dispatcher, migration),
        "open_requests": dispatcher.ledger.live,
        "queued_requests": len(dispatcher.queue),
        "queue_turns": {reason.value: count for reason, count in dispatcher.queue.turns.items()},
        "ttft_correction": dispatcher.admission.correction.quantile(0.5),
        "prompts": {
            "tokenized": dispatcher.prompts.tokenized,
            "estimated": dispatcher.prompts.estimated,
            "cache_hits": dispatcher.prompts.hits,
            "bytes_per_token": dispatcher.prompts.bytes_per_token,
            "prefix_blocks": dispatcher.index.count_blocks(),
        },
        "prefixes": dispatcher.series.describe_prefixes(),
        "workers": [row_of(worker, dispatcher, now_s) for worker in dispatcher.table],
    }


def _moves(dispatcher: RequestDispatcher, migration: Migration) -> dict[str, Any] | None:
    """Moves of running requests, and how old the rows are that they are decided on."""
    policy = dispatcher.policy
    if not policy.moves_requests:
        return None
    running = policy.running
    gains = dispatcher.series.move_gains.to_dict()
    return {
        **policy.orders.to_dict(),
        "failed": migration.failed,
        "gains": gains,
        "rows": running.to_dict(),
        "lengths": running.lengths.to_dict(),
    }


def _roles(dispatcher: RequestDispatcher) -> dict[str, list[str]]:
    """Names of the ready instances, by role."""
    roles = dispatcher.table.fleet.by_role
    return {role.value: [one.name for one in members] for role, members in roles.items() if members}


def _pools(dispatcher: RequestDispatcher) -> tuple[AveragedPressure, dict[PrefillClass, list[InstanceView]]] | None:
    """The pool-pressure controller and the ready members of each pool, where there is one."""
    controllers = () if dispatcher.policy.runner is None else dispatcher.policy.runner.policy.controllers
    for controller in controllers:
        if isinstance(controller, AveragedPressure):
            members = dispatcher.table.fleet.prefill_capable()
            return controller, {kind: [one for one in members if one.length_class is kind] for kind in PrefillClass}
    return None


def _boundary(dispatcher: RequestDispatcher) -> dict[str, Any] | None:
    """New tokens at which a prefill is long, without and with history, and the step model that they are from."""
    runner = dispatcher.policy.runner
    policy = None if runner is None else runner.policy.dispatcher
    if not isinstance(policy, SpatialDispatcher):
        return None
    return {
        "boundary_tokens": policy.boundary.tokens(0),
        "boundary_tokens_at_8k_history": policy.boundary.tokens(8192),
        "step_model": None if policy.boundary.fit is None else policy.boundary.model.to_dict(),
    }


def _pressure(dispatcher: RequestDispatcher) -> dict[str, Any] | None:
    """Pressures, signals and knobs of PLA-Serve's Algorithm 2."""
    found = _pools(dispatcher)
    if found is None:
        return None
    controller, pools = found
    return {
        **{kind.value: controller.pool_pressure(members) for kind, members in pools.items()},
        "by_instance": {one.name: controller.signals(one)._asdict() for pool in pools.values() for one in pool},
        "knobs": dataclasses.asdict(controller.knobs),
    }
