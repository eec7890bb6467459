"""Reasons of router and planner decisions. Every fleet decision carries exactly one, including "no action".

One list for all families, so that metrics, reports and tests name them alike. Values are ``family.reason``. A policy of
another package lists its own in an enum derived from ``Reason``.
"""

from __future__ import annotations

from pla_sglang.policy.interface.fast_enum import FastEnum


class Reason(FastEnum):
    """The reason of a decision; members have texts as values."""


class FleetReason(Reason):
    """Reason of a dispatch, a placement or a fleet action."""

    # any dispatcher
    NO_INSTANCE = "any.no_instance"  # nobody is ready for this phase
    KEEP_LOCAL = "any.keep_local"  # one instance does both phases of this request
    NOT_CONNECTED = "any.not_connected"  # no KV cache can go between its two instances (yet): one does both phases
    WHEN_PREFILLED = "any.when_prefilled"  # its decode is placed when its prefill is done; before, it is served whole
    NOT_MOVABLE = "any.not_movable"  # it, or the instance that its decode was to go to, cannot: it stays where it is
    OTHER_PAIR = "any.other_pair"  # the former pair's KV transfer has failed
    ROLLED_BACK = "any.rolled_back"  # a role change was made for a request that could not be placed then
    LAST_RESORT = "any.last_resort"  # it has lost its instance, and only one that drains, or that one, is left
    OPERATOR = "any.operator"  # an operator has ordered it
    # baselines
    ROUND_ROBIN = "baseline.round_robin"
    LEAST_REQUESTS = "baseline.least_requests"
    LEAST_TOKENS = "baseline.least_tokens"
    TWO_CHOICES = "baseline.two_choices"
    CACHE_HIT = "baseline.cache_hit"
    CACHE_MISS = "baseline.cache_miss"
    CACHE_IMBALANCE = "baseline.cache_imbalance"  # loads differ too much to look at the cache
    MINIMAL_LOAD = "baseline.minimal_load"
    CURRENT_LOAD = "baseline.current_load"  # migrate: levels what runs now
    BALANCED = "baseline.balanced"
    UTILISATION_HIGH = "baseline.utilisation_high"
    UTILISATION_LOW = "baseline.utilisation_low"
    UTILISATION_IN_BAND = "baseline.utilisation_in_band"
    SLA_DEMAND = "baseline.sla_demand"
    SLA_UNCHANGED = "baseline.sla_unchanged"
    COOL_DOWN = "any.cool_down"
    STARTING = "any.starting"  # no instance is stopped while others are still starting
    LAST_OF_PHASE = "any.last_of_phase"  # stopping one would leave a phase without a ready instance
    NO_DATA = "any.no_data"
    # Arrow
    PREFILL_SLO = "arrow.prefill_slo"  # Alg. 1: t1 keeps the TTFT target
    PREFILL_SLO_MIXED = "arrow.prefill_slo_mixed"  # Alg. 1: t2 of the D->P pool keeps it
    PREFILL_FLIP = "arrow.prefill_flip"  # Alg. 1: a decode instance was moved for it
    PREFILL_FALLBACK = "arrow.prefill_fallback"  # Alg. 1: t1 although it is late
    DECODE_IN_PLACE = "arrow.decode_in_place"  # Alg. 2: the prefill instance decodes now
    DECODE_SLO = "arrow.decode_slo"  # Alg. 2: t1 has room
    DECODE_SLO_MIXED = "arrow.decode_slo_mixed"  # Alg. 2: t2 of the P->D pool has room
    DECODE_FLIP = "arrow.decode_flip"  # Alg. 2: a prefill instance was moved for it
    DECODE_FALLBACK = "arrow.decode_fallback"  # Alg. 2: the smaller of t1 and t2
    FLIP_TTFT = "arrow.flip_ttft"  # Alg. 3, called by Alg. 1
    FLIP_NO_ROOM = "arrow.flip_no_room"  # Alg. 4, trigger 1: called by Alg. 2
    FLIP_TPOT = "arrow.flip_tpot"  # trigger 2: token interval above target for a while
    FLIP_IDLE = "arrow.flip_idle"  # trigger 3: prefill idle, decode busy
    DRAINED = "arrow.drained"  # a transitional pool member has no old work left
    REPAIR = "arrow.repair"  # a phase had lost its last instance
    HOLD_LAST = "arrow.hold_last"  # it would have been the last of its phase
    HOLD_PLAN = "arrow.hold_plan"  # the number of prefill instances is off its plan in that direction already
    HOLD_OVERLOAD = "arrow.hold_overload"  # decode is loaded as well: decode first
    HOLD_LATE = "arrow.hold_late"  # the request would be late on the flipped instance too
    HOLD_COOL_DOWN = "arrow.hold_cool_down"
    STEADY = "arrow.steady"
    # STAR
    STAR_MIGRATE = "star.migrate"
    STAR_BALANCED = "star.balanced"  # no instance is overloaded
    STAR_NO_CANDIDATE = "star.no_candidate"  # nothing pays for its move and fits
    STAR_NO_GAIN = "star.no_gain"  # no feasible move lowers the variance enough
    # DOPD
    DOPD_RATIO = "dopd.ratio"
    DOPD_TOTAL = "dopd.total"  # the number of instances of both phases together
    DOPD_UNCHANGED = "dopd.unchanged"
    DOPD_HYSTERESIS = "dopd.hysteresis"
    DOPD_LOCAL = "dopd.local"  # ultra-short: prefilled in place on the decode instance
    DOPD_REMOTE = "dopd.remote"
    # PLA-Serve
    PLA_SHORT = "pla.short"
    PLA_LONG = "pla.long"
    PLA_SPILL = "pla.spill"  # the own pool would be late, the other would not
    PLA_HOLDER = "pla.holder"  # it has the prefix in its cache, and is of another pool
    PLA_RECOMPUTE = "pla.recompute"  # the holder's queue costs more than computing the prefix elsewhere
    PRESSURE_SHORT = "pla.pressure_short"  # Alg. 2 line 26: an instance joins the short pool
    PRESSURE_LONG = "pla.pressure_long"  # Alg. 2 line 28
    PRESSURE_BALANCED = "pla.pressure_balanced"
    PRESSURE_MINIMUM = "pla.pressure_minimum"
    PRESSURE_RETURN = "pla.pressure_return"  # the pool that gives would ask for it back at once
    # combined
    SPARE_DECODE = "combined.spare_decode"  # in place: sooner than in a prefill pool that is not at ease
    SPARE_LATE = "combined.spare_late"  # in place: late everywhere else
    UNITED = "combined.united"  # no roles: where both phases cost least
    UNITE = "combined.unite"  # roles are dropped: decodes tolerate the prefills on their instances
    SPLIT = "combined.split"  # roles are taken: they do not
    VETO = "combined.veto"  # another part with precedence wants the opposite
