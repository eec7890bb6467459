"""What to type to start a fleet that a plan names: a line for each kind of server, and one for the router."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pla_sglang.policy_packages import find_policy
from pla_sglang.sim.core.experiment import TEMPORAL, Experiment
from pla_sglang.sim.planning.forms import STOCK_ORDER, FleetForm
from pla_sglang.sim.planning.result import FleetRow

TRANSFER = "--disaggregation-transfer-backend nixl"
# Who moves requests knows of running ones from load reports.
STATELESS = f"--pla-stateless {TRANSFER} --pla-telemetry tcp://ROUTER:30500"
MOVES = "--migration on --telemetry tcp://0.0.0.0:30500"


def list_start_lines(form: FleetForm, row: FleetRow) -> list[str]:
    """Shell lines, each server's with a comment that says how many of it. Words in capitals stand for the user's.

    Empty where nothing was found, where the router does not offer the policy, for knobs that have no flag, and for a
    split of instances whose requests move: the router chooses it by itself.
    """
    experiment, policy = form.experiment, find_policy(form.experiment.policy)
    if row.instances is None or not policy.live or experiment.engine_knobs or experiment.instances_of:
        return []
    if policy.fixed_split and policy.migrates:
        return []
    counts = {STATELESS: row.instances} if policy.flips or policy.migrates else {"": row.instances}
    if row.prefills is not None:
        kinds = {"prefill": row.prefills, "decode": row.instances - row.prefills}
        counts = {f"--disaggregation-mode {kind} {TRANSFER}": count for kind, count in kinds.items()}
    lines = [f"{_server_line(form, row, kind)}  # {count} of these" for kind, count in counts.items()]
    return [*lines, _router_line(experiment, moves=STATELESS in counts)]


def _server_line(form: FleetForm, row: FleetRow, kind: str) -> str:
    experiment, words = form.experiment, ["--model-path MODEL"]
    decodes_only = "--disaggregation-mode decode" in kind
    if row.gpus_per_instance > 1:
        words.append(f"--tp-size {row.gpus_per_instance}")
    if kind:
        words.append(kind)
    if not decodes_only:
        words += _prefill_flags(experiment)
        words.append(f"--chunked-prefill-size {experiment.chunk_tokens}")
    words.append(f"--max-running-requests {experiment.slots}")
    module = "sglang.launch_server" if form.stock else "pla_sglang.launch_server"
    return f"python -m {module} {' '.join(words)} --host HOST --port PORT"


def _prefill_flags(experiment: Experiment) -> Iterator[str]:
    if experiment.engine == TEMPORAL:
        yield "--prefill-disagg temporal"
        if experiment.deadlines != "advise":
            yield f"--pla-deadlines {experiment.deadlines}"
    elif experiment.engine != STOCK_ORDER:
        yield f"--schedule-policy {experiment.engine}"
    if experiment.mixed:
        yield "--enable-mixed-chunk"
    if experiment.decode_interval:
        yield f"--prefill-decode-interval {experiment.decode_interval}"


def _router_line(experiment: Experiment, *, moves: bool) -> str:
    words = [f"--policy {experiment.policy}"]
    for flag, target_s in (("ttft", experiment.slo.ttft_s), ("tpot", experiment.slo.tpot_s)):
        if math.isfinite(target_s):
            words.append(f"--slo-{flag}-ms {1e3 * target_s:g}")
    words += [f"--policy-knob {knob}" for knob in experiment.policy_knobs]
    if moves:
        words.append(MOVES)
    return f"python -m pla_sglang.launch_router {' '.join(words)} --worker http://HOST:PORT ..."
