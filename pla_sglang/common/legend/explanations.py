"""What each reason of a decision means, for people who do not know the policies. A test keeps the enums covered."""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_PREFIX = "pass."  # of reasons that engines give for their passes

FLEET: Mapping[str, str] = {
    "any.no_instance": "No instance is ready for this phase; the request waits.",
    "any.not_connected": "No KV cache could go between the two instances: one does both phases.",
    "any.when_prefilled": "Its decode is placed when its prefill is done; until then one instance serves it whole.",
    "any.not_movable": "It could not go where its decode was to be: it stays at the instance of its prefill.",
    "any.rolled_back": "A change of roles was taken back, as the request that it was made for could not be placed.",
    "any.last_resort": "Its instance was lost, and only one that drains, or that one itself, could take it.",
    "any.operator": "An operator has ordered it.",
    "any.keep_local": "One instance does both phases of the request.",
    "any.other_pair": "The KV transfer of the former pair has failed; another pair is taken.",
    "any.cool_down": "The last change was too recent for another one.",
    "any.starting": "No instance leaves while others are still starting.",
    "any.last_of_phase": "No instance leaves: a phase would have none that is ready.",
    "any.no_data": "Nothing has been measured yet that a decision could rest on.",
    "baseline.round_robin": "The next instance in turn.",
    "baseline.least_requests": "The instance with the fewest unfinished requests.",
    "baseline.least_tokens": "The instance with the fewest prompt and KV tokens.",
    "baseline.two_choices": "The lighter of two instances that were drawn at random.",
    "baseline.cache_hit": "The instance that holds most of the prompt in its prefix cache.",
    "baseline.cache_miss": "No instance holds enough of the prompt; the least loaded one is taken.",
    "baseline.cache_imbalance": "Loads differ too much to look at the prefix caches; the least loaded one is taken.",
    "baseline.minimal_load": "The instance with the least predicted delay, or the least running tokens.",
    "baseline.current_load": "A running request moves from the fullest to the emptiest instance.",
    "baseline.balanced": "Loads are level; no running request moves.",
    "baseline.utilisation_high": "Utilisation is above the upper threshold; an instance is added.",
    "baseline.utilisation_low": "Utilisation is below the lower threshold; an instance is removed.",
    "baseline.utilisation_in_band": "Utilisation is between the thresholds; the fleet stays as it is.",
    "baseline.sla_demand": "The forecast load needs another number of instances.",
    "baseline.sla_unchanged": "The forecast load needs the instances that there are.",
    "arrow.prefill_slo": "The prefill instance with the least predicted delay keeps the TTFT target (Algorithm 1).",
    "arrow.prefill_slo_mixed": "An instance on its way from decode to prefill keeps the TTFT target (Algorithm 1).",
    "arrow.prefill_flip": "A decode instance was turned to prefill for the request (Algorithm 1).",
    "arrow.prefill_fallback": "Nobody keeps the TTFT target; the least late prefill instance is taken (Algorithm 1).",
    "arrow.decode_in_place": "The instance of the prefill decodes as well: it is to decode now (Algorithm 2).",
    "arrow.decode_slo": "The decode instance with the least running tokens has room (Algorithm 2).",
    "arrow.decode_slo_mixed": "An instance on its way from prefill to decode has room (Algorithm 2).",
    "arrow.decode_flip": "A prefill instance was turned to decode for the request (Algorithm 2).",
    "arrow.decode_fallback": "Nobody has room; the instance with the least running tokens is taken (Algorithm 2).",
    "arrow.flip_ttft": "Decode to prefill: a request would have missed its TTFT target (Algorithm 3).",
    "arrow.flip_no_room": "Prefill to decode: no decode instance had room (Algorithm 4, trigger 1).",
    "arrow.flip_tpot": "Prefill to decode: tokens came later than their target for a while (Algorithm 4, trigger 2).",
    "arrow.flip_idle": "Prefill to decode: prefill was idle while decode was busy (Algorithm 4, trigger 3).",
    "arrow.drained": "An instance in transition has finished its old work and joins its new pool.",
    "arrow.repair": "A phase had lost its last instance; another one takes it over.",
    "arrow.hold_last": "No change: the instance is the last one of its phase.",
    "arrow.hold_overload": "No change to prefill: decode is overloaded as well, and comes first.",
    "arrow.hold_late": "No change to prefill: the request would be late on the changed instance too.",
    "arrow.hold_cool_down": "No change: the last one was too recent.",
    "arrow.hold_plan": "No change: the number of prefill instances is off the best one in that direction already.",
    "arrow.steady": "Nothing asks for a change of roles.",
    "star.migrate": "A running request moves: that lowers the predicted imbalance of decode instances.",
    "star.balanced": "No decode instance is overloaded, now or in the prediction; nothing moves.",
    "star.no_candidate": "No running request fits elsewhere and pays for its move.",
    "star.no_gain": "No possible move lowers the imbalance enough.",
    "dopd.ratio": "The number of prefill and decode instances follows the computed ratio.",
    "dopd.total": "The number of instances follows the forecast load.",
    "dopd.unchanged": "The computed ratio is the one that there is.",
    "dopd.hysteresis": "The computed ratio differs, but not for long or not by enough.",
    "dopd.local": "An ultra-short prompt is prefilled on its decode instance.",
    "dopd.remote": "The prompt is prefilled on a prefill instance.",
    "pla.short": "A short prompt goes to the pool of short prompts.",
    "pla.long": "A long prompt goes to the pool of long prompts.",
    "pla.spill": "The request's own pool would be late or has no member; another pool takes it.",
    "pla.holder": "The instance that holds the prompt's prefix takes it, though it is of another pool.",
    "pla.recompute": "The queue of the prefix's holder costs more than computing the prefix elsewhere.",
    "pla.pressure_short": "An instance joins the short pool, which is under more pressure (Algorithm 2, line 26).",
    "pla.pressure_long": "An instance joins the long pool, which is under more pressure (Algorithm 2, line 28).",
    "pla.pressure_balanced": "Both pools are under similar pressure; none gives an instance.",
    "pla.pressure_minimum": "The pool that would give an instance has no more than its minimum.",
    "pla.pressure_return": "The pool that would give an instance would ask for it back at once.",
    "combined.spare_decode": "Prefilled on a decode instance with time to spare: sooner than in the prefill pool.",
    "combined.spare_late": "Prefilled on a decode instance: it would be late everywhere else.",
    "combined.united": "Without roles: the instance where both phases cost least.",
    "combined.unite": "Roles are dropped: the fleet bears as much without them.",
    "combined.split": "Roles are taken: the fleet bears clearly more with them.",
    "combined.veto": "Another part with precedence wants the opposite.",
}
ENGINE: Mapping[str, str] = {
    "depth": "The batch of short prompts has reached its target depth.",
    "tokens": "The batch is full: its token budget or its request slots are used up.",
    "window": "The waiting window, or the longest wait that the first request may have, is over.",
    "slack": "A request of the batch must start now to be in time.",
    "bucket": "Requests of another graph bucket wait for the next batch.",
    "no_gain": "Waiting for one more request would cost more than it saves.",
    "queue_end": "Nothing else waits that could fill the batch.",
    "order": "The next request in the order of a baseline policy.",
    "resumed": "The batch holds a retracted request, whose user already sees a stream.",
    "no_short": "A long prompt runs: no short one is waiting.",
    "short_held": "A long prompt runs while short ones wait for a fuller batch.",
    "short_blocked": "A long prompt runs: the short ones have no KV memory or slots.",
    "age": "A long prompt runs: it is near its age bound.",
    "lost_short": "A long prompt runs: it is feasible, and the short ones that wait are not.",
    "lost_long": "A long prompt runs before the one whose turn it was, which is infeasible or was rejected.",
    "overdue": "Infeasible prompts were deferred for long enough; a share of time is theirs.",
    "urgent": "A long prompt runs: it has the earliest deadline of those to be kept, and one would be late else.",
    "priority": "A long prompt runs: its priority is above that of every short one.",
    "decode_turn": "No prefill: running requests have waited long enough for their next token.",
    "token_deadline": "No prefill: running requests decode now, or their next token would be late.",
    "wait_for_depth": "No prefill yet: waiting for a fuller batch pays.",
    "kv_drain": "No prefill: a long prompt needs KV memory that running requests will free.",
    "reserve": "No prefill: only requests wait that miss their target; memory and decode time are kept for others.",
    "kv_headroom": "No prefill: starting the long prompt would leave no KV memory for expected short ones.",
    "blocked": "No prefill: nothing that waits can run before memory or slots are freed.",
    "empty": "Nothing waits for its prefill.",
}
WORKER_PREFIX = "worker."  # of reasons why the router sees an instance in a state
WORKER: Mapping[str, str] = {
    "added": "It is known to the router, and has not answered yet.",
    "answers": "It has described itself and is healthy.",
    "health": "Health checks were missed; it gets nothing new.",
    "breaker": "Requests have failed there; it gets nothing new.",
    "recovered": "It answers again.",
    "operator": "An operator has drained it, or has taken the drain back.",
    "restarted": "Another process answers at its address.",
    "ending": "It was told to end (SIGTERM), and finishes what it has.",
    "no_answer": "Nobody has listened at its address for a while.",
    "removed": "An operator has removed it, and it has finished.",
}
MOVE: Mapping[str, str] = {  # of requests; policies have reasons of their own
    "lost": "The instance where it ran was lost.",
    "broken": "The connection to its instance has ended amid its answer.",
    "silent": "The instance where it ran said nothing any more.",
    "aborted": "Its instance has aborted it, and nobody had ordered that.",
    "not_sent": "It could not be sent to its instance.",
    "full": "Its instance had no room.",
    "drain": "The instance where it ran is to be empty.",
}
# What planners look at, as the axes of pages name it.
PLAN_FIGURES: Mapping[str, str] = {
    "requests_per_s": "requests/s",
    "requests": "requests at once",
    "input_tokens": "prompt, tokens",
    "output_tokens": "answer, tokens",
    "prefill_utilisation": "backlog / target",
    "decode_utilisation": "KV in use, share",
}
UNKNOWN = "A reason of a policy of another package; see its documentation."


def explain_reason(name: str) -> str:
    """One sentence for the name of a reason; those of engines have ``ENGINE_PREFIX``, of workers ``WORKER_PREFIX``."""
    if name.startswith(ENGINE_PREFIX):
        return ENGINE.get(name.removeprefix(ENGINE_PREFIX), UNKNOWN)
    if name.startswith(WORKER_PREFIX):
        return WORKER.get(name.removeprefix(WORKER_PREFIX), UNKNOWN)
    return FLEET.get(name, UNKNOWN)
