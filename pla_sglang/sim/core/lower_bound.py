"""The fewest instance-seconds that any autoscaler could have paid for given arrivals, even if it knew all of them.

**Model.** Instances of one profile; each runs one pass at a time, of the durations of ``StepProfile.step_s``. Any of
them may do any phase of any request, in any batch, also mixed. Each answer token but the first is a decode in one pass,
and the passes of a request follow each other. Requests move, and instances turn up and go, at no cost and in no time
(``paid_starts.py`` adds start-ups). Caches are those of ``upper_bound.py``. An instance is paid while it is there. A
kept request that arrives at ``a`` has its first token by ``a + ttft`` and its last of ``n`` by ``a + d``, with
``d = ttft + tpot * (n - 1)``. What is paid is at least the sum of all passes.

**Charges.** Each rule splits passes up, so that what the requests of a pass are charged is at most its duration. So all
kept requests' charges together are paid. ``k_p``, ``k_d``: the least corrections. A mixed pass takes at least what its
prefill terms say, and at least what its decodes take alone.

1. *work*: ``least_work`` of ``upper_bound.py``: prefill and decode, next to nothing for base times.
2. *memory*: of decodes only, ``k_d * (request_s + read_s * c + base_s * u / C)`` a token: as *work* has it, by what
   decodes take alone.
3. *pace*: of decodes only. A token bears ``m = k_d * (request_s + read_s * c)``, and of ``k_d * base_s`` the share
   ``m / sum of m``. In a pass of duration ``t`` that sum is at most ``t - k_d * base_s``. The passes of a kept request
   take ``tpot * (n - 1)`` together at most. By Cauchy and Schwarz it bears at least
   ``k_d * base_s * (sum of sqrt(m)) ** 2 / ((n - 1) * (tpot - k_d * base_s))`` beside its ``m``.
4. *alone*: for those who have nobody to share with. Every decode bears ``min(k_d * request_s, k_p * token_s) +
   k_d * read_s * c``. What is left of a pass, its *rest*, is at least ``k_d * base_s`` with decodes, all of it without,
   and at least the prefill work in it. A request lives through the rest of every pass that it is in, one after the
   other: at least ``alone_s``, that of its prefill and ``n - 1`` times ``k_d * base_s``. So in each window
   ``[a, a + d]`` at least so much rest is paid. (Of a prefix that several compute, the same holds for whoever computes
   it first.) Of windows that do not overlap, these add up: a choice of such windows with the largest sum is charged.
5. *alone, shared*: as *alone*, but every window is charged its rest over the most windows that overlap at any time in
   it. At each time the shares of those that overlap then add up to 1 at most.

Busy periods, the unions of overlapping windows, share no pass of kept requests, so each may have another rule.

**Who may miss.** Charges do not depend on who else is kept. So the least that remains when ``may_miss`` requests are
given up is what remains without the dearest. Any choice of rules by busy period gives a bound; the highest is taken of
those that charge most of every rule, and most in each period where no request counts for more than a price.

A request can be kept by nobody that fits no instance, whose ``alone_s`` before its first token is longer than ``ttft``,
or whose decodes take longer than ``tpot`` even by themselves.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from pla_sglang.profiles import StepProfile
from pla_sglang.sim.core.upper_bound import (
    LeastWork,
    least_corrections,
    least_work,
    read_context_tokens,
    unshared_context_tokens,
)
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Charge:
    """What requests are charged: [n] instance-seconds. The first is due with the first token, the other at the end."""

    prefill_s: Floats
    decode_s: Floats

    @property
    def sum_s(self) -> Floats:
        return self.prefill_s + self.decode_s

    def take(self, rows: Bools) -> Charge:
        return Charge(self.prefill_s[rows], self.decode_s[rows])


@dataclasses.dataclass(frozen=True)
class Demands:
    """What requests need of any fleet; rows in order of arrival.

    Attributes:
        arrival_s: [n].
        work: the rule *work*, and how long requests have.
        alone_s, alone_prefill_s: [n] of the rule *alone*; the second until the first token.
        marginal_s: [n] what decodes bear there beside it.
        memory_s, pace_s: [n] of these rules.
        too_long, late_ttft, late_end: [n] nobody can keep it: it fits no instance, or its first token, or those after
            it, take longer than they may.
    """

    arrival_s: Floats
    work: LeastWork
    alone_s: Floats
    alone_prefill_s: Floats
    marginal_s: Floats
    memory_s: Floats
    pace_s: Floats
    too_long: Bools
    late_ttft: Bools
    late_end: Bools

    @property
    def first_due_s(self) -> Floats:
        return self.arrival_s + self.work.ttft_s

    @property
    def due_s(self) -> Floats:
        return self.arrival_s + self.work.deadline_s

    def take(self, rows: Bools) -> Demands:
        work = dataclasses.replace(
            self.work, **{name: getattr(self.work, name)[rows] for name in ("prefill_s", "decode_s", "deadline_s")}
        )
        names = [field.name for field in dataclasses.fields(self) if field.name != "work"]
        return Demands(work=work, **{name: getattr(self, name)[rows] for name in names})


ROUNDING = 1e-9  # of sums of doubles: what is late by less than this share is not late


def find_demands(trace: Trace, slo: Slo, profile: StepProfile, *, answers: bool = False) -> Demands:
    """By the text of this module. ``answers``: prefix caches hold answers too."""
    work = least_work(trace, slo, profile, answers=answers)
    least_p, least_d = least_corrections(profile)
    prefill, decode = profile.prefill, profile.decode
    steps = np.maximum(trace.output_tokens - 1, 0).astype(np.float64)
    base_s, read_s = least_d * decode.base_s, least_d * decode.read_s
    read = read_s * read_context_tokens(trace)
    shared_s = base_s * unshared_context_tokens(trace, answers=answers) / profile.kv_capacity_tokens
    prefill_s = profile.pass_s + np.maximum(
        min(least_p * prefill.floor_s, base_s), least_p * prefill.base_s + work.prefill_s
    )
    own_s = steps * least_d * decode.request_s + read
    return Demands(
        arrival_s=trace.arrival_s,
        work=work,
        alone_s=prefill_s + steps * base_s,
        alone_prefill_s=prefill_s,
        marginal_s=steps * min(least_d * decode.request_s, least_p * prefill.token_s) + read,
        memory_s=own_s + shared_s,
        pace_s=own_s + _paced_base_s(trace, slo, base_s, (least_d * decode.request_s, read_s)),
        too_long=trace.input_tokens + trace.output_tokens - 1 > profile.kv_capacity_tokens,
        late_ttft=prefill_s > slo.ttft_s * (1 + ROUNDING),
        late_end=steps * base_s + own_s
        > np.where(steps > 0, slo.tpot_s, np.inf) * np.maximum(steps, 1) * (1 + ROUNDING),
    )


def _paced_base_s(trace: Trace, slo: Slo, base_s: float, token: tuple[float, float]) -> Floats:
    """[n] of base times, by the rule *pace*. ``token``: seconds of a token, and of each token of its context.

    The sum of the roots is at least that of a straight line between the first and the last, as a root is concave.
    """
    room_s = slo.tpot_s - base_s
    if not 0 < room_s < np.inf:
        return np.zeros(len(trace))
    steps = np.maximum(trace.output_tokens - 1, 0).astype(np.float64)
    request_s, read_s = token
    first = np.sqrt(request_s + read_s * trace.input_tokens)
    last = np.sqrt(request_s + read_s * (trace.input_tokens + np.maximum(steps - 1, 0)))
    paced: Floats = base_s * steps * ((first + last) / 2) ** 2 / room_s
    return paced


def charge_requests(demands: Demands, may_miss: int = 0) -> Charge:
    """By the choice of rules whose bound is highest. More than ``may_miss`` requests; all can be kept."""
    rules = list_rules(demands)
    begins = find_busy_periods(demands)
    period = np.cumsum(np.bincount(begins, minlength=len(demands.arrival_s))) - 1
    choices = list(rules)
    for price_s in sorted({_dearest_kept_s(rule.sum_s, may_miss) for rule in rules}):
        sums = np.array([np.add.reduceat(np.minimum(rule.sum_s, price_s), begins) for rule in rules])
        best = sums.argmax(axis=0)[period]
        prefill_s = np.choose(best, [rule.prefill_s for rule in rules])
        choices.append(Charge(prefill_s, np.choose(best, [rule.decode_s for rule in rules])))
    return max(choices, key=lambda choice: choice.sum_s[keep_cheapest(choice.sum_s, may_miss)].sum())


def _dearest_kept_s(charge_s: Floats, may_miss: int) -> float:
    """Where no request may be given up, none counts for too much."""
    return float(np.sort(charge_s)[len(charge_s) - 1 - may_miss]) if may_miss else np.inf


def list_rules(demands: Demands) -> list[Charge]:
    """In the order of this module's text."""
    nothing = np.zeros(len(demands.arrival_s))
    chosen = choose_windows(demands.arrival_s, demands.due_s, demands.alone_s)
    return [
        Charge(demands.work.prefill_s, demands.work.decode_s),
        Charge(nothing, demands.memory_s),
        Charge(nothing, demands.pace_s),
        Charge(nothing, demands.marginal_s + np.where(chosen, demands.alone_s, 0.0)),
        Charge(nothing, demands.marginal_s + demands.alone_s / count_overlaps(demands.arrival_s, demands.due_s)),
    ]


def find_busy_periods(demands: Demands) -> Ints:
    """The first row of each."""
    ended_s = np.maximum.accumulate(demands.due_s)[:-1]
    return np.flatnonzero(np.append(True, demands.arrival_s[1:] > ended_s))


def count_overlaps(start_s: Floats, end_s: Floats) -> Ints:
    """[n] the most windows that overlap at any time within each; starts ascend.

    The most overlap as one begins, so these are maxima over rows: of powers of two of rows, one power after the other.
    """
    rows = np.arange(len(start_s))
    open_now = rows + 1 - np.searchsorted(np.sort(end_s), start_s, side="left")
    last = np.maximum(rows, np.searchsorted(start_s, end_s, side="right") - 1)
    power = np.frexp(last - rows + 1)[1] - 1  # of two, the largest that fits
    most, found = open_now, np.ones(len(rows), np.int64)
    for at in range(int(power.max()) + 1):
        of = np.flatnonzero(power == at)
        found[of] = np.maximum(most[of], most[last[of] + 1 - 2**at])
        most = np.maximum(most[: -(2**at)], most[2**at :]) if len(most) > 2**at else most
    return found


def choose_windows(start_s: Floats, end_s: Floats, worth: Floats) -> Bools:
    """[n] windows that do not overlap, with the largest sum of ``worth``; starts ascend."""
    order = np.argsort(end_s, kind="stable")
    before = np.searchsorted(end_s[order], start_s[order], side="right").tolist()  # windows that have ended by then
    best = [0.0]
    for place, (value, ended) in enumerate(zip(worth[order].tolist(), before, strict=True)):
        best.append(max(best[place], best[min(ended, place)] + value))
    chosen = np.zeros(len(start_s), np.bool_)
    place = len(best) - 1
    while place:
        if best[place] == best[place - 1]:
            place -= 1
            continue
        chosen[order[place - 1]] = True
        place = min(before[place - 1], place - 1)
    return chosen


def keep_cheapest(charge_s: Floats, may_miss: int) -> Bools:
    """[n] who is kept when the ``may_miss`` dearest are given up; of equal ones those that came last."""
    kept = np.ones(len(charge_s), np.bool_)
    if may_miss:
        kept[np.argsort(charge_s, kind="stable")[len(charge_s) - may_miss :]] = False
    return kept


def last_end_s(demands: Demands, may_miss: int) -> float:
    """When the last answer ends at the earliest, whoever is given up. Fewer than all are."""
    return float(np.sort(demands.arrival_s + demands.alone_s)[len(demands.arrival_s) - 1 - may_miss])


def idle_s(demands: Demands, until_s: float) -> float:
    """Seconds between the first arrival and ``until_s`` that are in no window."""
    arrival_s = demands.arrival_s
    ended_s = np.minimum(np.maximum.accumulate(demands.due_s), until_s)
    gaps_s = np.minimum(arrival_s[1:], until_s) - ended_s[:-1]
    return float(np.maximum(gaps_s, 0.0).sum() + max(0.0, until_s - ended_s[-1]))
