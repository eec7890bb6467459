"""What a recorded load would have met under another policy, ratio or fleet, with an interval from measured parity.

The recorded fleet is simulated first. What its hosts add is fitted to the recording, the constants of ``bench
fidelity``. What remains is the simulator's error, measured: the recording is cut into spans of equally many requests,
and in each the times that were predicted are compared, by rank, with those that were recorded. The other setting is
simulated with the same constants, and its times are corrected with the error of each span in turn: as if the whole run
had erred as that span did. The interval reaches from the least of these answers to the greatest. Were the error of the
other setting one more draw from the same distribution, it would lie there with a probability of (k-1)/(k+1) of k spans.

A share of n requests is a sample besides, and so is the share below a percentile: both are widened by Wilson's interval
for the same probability.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import DEADLINES
from pla_sglang.policy.common.fleet_policy import NO_PLANNER
from pla_sglang.policy_packages import find_policy
from pla_sglang.profiles import load_profile
from pla_sglang.recording.rows import RecordError
from pla_sglang.sim.core.config import PrefixKnowledge
from pla_sglang.sim.core.experiment import ENGINES, Experiment, run_experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.core.upper_bound import longest_known_prefix_tokens
from pla_sglang.sim.metrics.goodput import Served, Slo, goodput, quantile
from pla_sglang.sim.planning.limits import lone_prefill_s
from pla_sglang.sim.planning.recorded import RecordedRun

Floats = npt.NDArray[np.float64]
SPANS_MOST = 19  # an interval of 90 %
SPAN_REQUESTS = 10  # at least: of fewer there is no P90
SPANS_LEAST = 10
FIGURES = ("attainment", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s")
KINDS = {"prefill", "decode"}


@dataclasses.dataclass(frozen=True)
class PredictedRange:
    predicted: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """The recorded fleet, measured and simulated.

    Attributes:
        recorded, replayed: by figure: measured, and simulated with the recorded setting.
        host: constants that were fitted.
        spans: of requests, as slices.
        span_s: mean length of one.
        load_seen: device work of an instance a second, in the busiest span.
    """

    run: RecordedRun
    experiment: Experiment
    recorded: dict[str, float]
    replayed: dict[str, float]
    simulated: Served
    host: HostKnobs
    spans: tuple[slice, ...]
    span_s: float
    load_seen: float

    @property
    def confidence(self) -> float:
        return (len(self.spans) - 1) / (len(self.spans) + 1)


def experiment_of(run: RecordedRun) -> Experiment:
    """The recorded fleet. Raises RecordError for what cannot be simulated as it was."""
    header, engine = run.header, run.header.engine
    setup = header.setup
    if engine is None:
        raise RecordError(
            f"version {header.version} of a recording does not say how its engines were started; record it again"
        )
    if engine.order not in ENGINES:
        raise RecordError(
            f"engines with --schedule-policy {engine.order} are not simulated; allowed: {', '.join(ENGINES)}"
        )
    if engine.deadlines not in DEADLINES or not run.kinds:
        raise RecordError("the recording has no instance before its first request, or engines of an unknown kind")
    if run.changes:
        raise RecordError(
            f"the fleet changed while it was recorded: {run.changes[0]}; allowed: the same one throughout"
        )
    if own := [name for name in run.profiles if name not in ("", header.profile)]:
        raise RecordError(f"instances of several profiles ({header.profile}, {own[0]}); allowed: one")
    if setup.get("planner", NO_PLANNER) != NO_PLANNER:
        raise RecordError(f"planner {setup['planner']!r} was there; allowed: a fleet of a fixed size")
    split = set(run.kinds) == KINDS
    try:
        return Experiment(
            policy=header.policy,
            slo=Slo(setup["ttft_slo_s"], setup["tpot_slo_s"]),
            engine=engine.order,
            profile=header.profile,
            instances=len(run.kinds),
            prefills=run.kinds.count("prefill") if split else None,
            chunk_tokens=engine.chunk_tokens or load_profile(header.profile).kv_capacity_tokens,
            mixed=engine.mixed,
            decode_interval=engine.decode_interval,
            deadlines=engine.deadlines,
            slots=engine.slots or Experiment.slots,
            kv_capacity_tokens=setup["kv_capacity_tokens"],
            stateless=setup["stateless"],
            migrates=setup["migrates"],
            move_gain=setup["move_gain"],
            seed=setup["seed"],
            policy_knobs=tuple(f"{name}={value}" for name, value in setup["knobs"].items()),
            prefix_knowledge=PrefixKnowledge.INDEX if run.trace.hash_ids is not None else PrefixKnowledge.EXACT,
            report_interval_s=0.02,  # live engines report each change
        )
    except (KeyError, TypeError) as error:
        raise RecordError(f"the header is incomplete: {error}") from None


def replay_recorded(run: RecordedRun, experiment: Experiment) -> WhatIf:
    """``experiment``: of ``experiment_of``, with targets of choice. Raises RecordError for a recording too short."""
    count = min(SPANS_MOST, len(run.trace) // SPAN_REQUESTS)
    if count < SPANS_LEAST:
        least = SPANS_LEAST * SPAN_REQUESTS
        raise RecordError(f"{len(run.trace)} served requests say too little of the simulator's error; allowed: {least}")
    edges = np.linspace(0, len(run.trace), count + 1).astype(int).tolist()
    spans = tuple(slice(*pair) for pair in itertools.pairwise(edges))
    host = fit_host_under_load(run, experiment)
    simulated = simulate(dataclasses.replace(experiment, host=host), run)
    return WhatIf(
        run=run,
        experiment=experiment,
        recorded=figures_of(run.served, experiment.slo),
        replayed=figures_of(simulated, experiment.slo),
        simulated=simulated,
        host=host,
        spans=spans,
        span_s=run.trace.span_s / count,
        load_seen=max(work_per_s(run, span) for span in spans) / experiment.instances,
    )


def predict(known: WhatIf, other: Experiment) -> dict[str, PredictedRange]:
    """By figure, what ``other`` would have met. Raises ConfigError outside of what was recorded."""
    check_other(known, other)
    served = simulate(dataclasses.replace(other, host=known.host), known.run)
    parts = [(_part(known.run.served, span), _part(known.simulated, span)) for span in known.spans]
    answers = [served, *(correct(served, live, simulated) for live, simulated in parts)]
    plain = figures_of(served, other.slo)
    return {name: _enclose(name, value, answers, other.slo, known.confidence) for name, value in plain.items()}


def _enclose(name: str, value: float, answers: Sequence[Served], slo: Slo, confidence: float) -> PredictedRange:
    """From the least of the answers to the greatest, each widened as a sample."""
    n = len(answers[0])
    if name == "attainment":
        shares = [float(served.met(slo).mean()) for served in answers]
        ends = [widen(share, n, confidence, up=up) for share in shares for up in (False, True)]
    else:
        kind, percentile, _ = name.split("_")
        columns = [getattr(served, f"{kind}_s")() for served in answers]
        share = float(percentile[1:]) / 100
        levels = [100 * widen(share, n, confidence, up=up) for up in (False, True)]
        ends = [end for column in columns for level in levels if not math.isnan(end := quantile(column, level))]
    return PredictedRange(value, min(ends, default=math.nan), max(ends, default=math.nan))


def check_other(known: WhatIf, other: Experiment) -> None:
    """Raises ConfigError for a setting of which the recording says nothing."""
    served = known.experiment
    if other.profile != served.profile or other.instances_of:
        raise ConfigError(f"--profile {other.profile}: the recording was served on {served.profile}; allowed: that")
    if other.rate_per_s is not None:
        raise ConfigError("--rates: a recording says nothing of another load; allowed: as recorded")
    if find_policy(other.policy).scales or other.planner != NO_PLANNER:
        raise ConfigError("a fleet that grows or shrinks is not in the recording; allowed: a fixed size")
    fewest = find_fewest_instances(known)
    if other.instances < fewest:
        asked = _find_work_per_s(known.run) / other.instances
        raise ConfigError(
            f"--instances {other.instances}: each would have {asked:.2f} s of work a second; the recording has seen "
            f"{known.load_seen:.2f} at most (over {known.span_s:.0f} s); allowed: {fewest} and more"
        )


def find_fewest_instances(known: WhatIf) -> int:
    """So many that none has more work than one has had in the busiest span."""
    return max(1, math.ceil(_find_work_per_s(known.run) / known.load_seen))


def _find_work_per_s(run: RecordedRun) -> float:
    return work_per_s(run, slice(0, len(run.trace)))


def measure_spans(known: WhatIf) -> Iterator[tuple[float, ...]]:
    """Yields for each span when it begins, P90 of TTFT measured and simulated, and the same of TPOT."""
    for span in known.spans:
        live, simulated = _part(known.run.served, span), _part(known.simulated, span)
        sides = live, simulated
        yield (
            float(live.arrival_s[0]),
            *(quantile(one.ttft_s(), 90) for one in sides),
            *(quantile(one.tpot_s(), 90) for one in sides),
        )


def work_per_s(run: RecordedRun, span: slice) -> float:
    """Device seconds a second of the arrivals in ``span``: lone prefills of what was not cached, and decode steps at
    half of the profile's batch range, which a token takes its part of."""
    profile, trace = load_profile(run.header.profile), run.trace.take(span)
    cached = longest_known_prefix_tokens(run.trace)[span]
    prefill_s = lone_prefill_s(trace, cached, profile, chunk_tokens=profile.kv_capacity_tokens)
    batch = max(1, (profile.coverage.decode_batch or (0, 2))[1] // 2)
    context = float((trace.input_tokens + trace.output_tokens / 2).mean())
    token_s = profile.decode_s(batch, batch * context) / batch
    following = run.trace.arrival_s[span.stop] if span.stop < len(run.trace) else run.trace.arrival_s[-1]
    return float(
        (prefill_s.sum() + token_s * (trace.output_tokens - 1).sum()) / max(1e-9, following - trace.arrival_s[0])
    )


def simulate(experiment: Experiment, run: RecordedRun) -> Served:
    """Raises ConfigError."""
    return run_experiment(experiment, run.trace).result.served


def fit_host_under_load(run: RecordedRun, experiment: Experiment) -> HostKnobs:
    """Constants with which medians of TPOT and TTFT are as recorded.

    Under load a longer step makes waits longer too, so how much TPOT grows with a step is seen from a second run
    (a step of the secant method). What a request takes besides is found last: it delays only that request.
    """
    pairs = experiment.prefills is not None

    def lacking(host: HostKnobs) -> Served:
        return simulate(dataclasses.replace(experiment, host=host), run)

    def lacks_s(served: Served) -> float:
        return _at_least_0(quantile(run.served.tpot_s(), 50) - quantile(served.tpot_s(), 50))

    first = lacking(HostKnobs(overlap=True, room_first=pairs))
    step_s = first_s = lacks_s(first)
    second = lacking(HostKnobs(overlap=True, room_first=pairs, step_s=step_s))
    grown_s = quantile(second.tpot_s(), 50) - quantile(first.tpot_s(), 50)
    if grown_s > first_s:
        step_s *= first_s / grown_s
        second = lacking(HostKnobs(overlap=True, room_first=pairs, step_s=step_s))
    way = fit_host(run.served, second, pairs=pairs)
    return dataclasses.replace(way, step_s=step_s)


def fit_host(live: Served, simulated: Served, *, pairs: bool) -> HostKnobs:
    """Constants out of runs of the same requests: medians of what the simulator without constants lacks.

    What a pair lacks until its first token is divided equally between the way in, the handshake and the hand-off: only
    their sum can be seen. Raises ConfigError where the runs differ in requests, or have none.
    """
    if len(live) != len(simulated) or not len(live):
        raise ConfigError(f"{len(live)} live requests, {len(simulated)} simulated; allowed: the same ones")
    first_s = max(0.0, quantile(live.ttft_s() - simulated.ttft_s(), 50))
    step_s = _at_least_0(quantile(live.tpot_s() - simulated.tpot_s(), 50))
    way_s = max(0.0, first_s - step_s)  # the prefill pass has its share of what every pass takes longer
    if not pairs:
        return HostKnobs(overlap=True, front_s=way_s, step_s=step_s)
    part_s = way_s / 3
    return HostKnobs(overlap=True, room_first=True, front_s=part_s, handshake_s=part_s, handoff_s=part_s, step_s=step_s)


def _at_least_0(value: float) -> float:
    return 0.0 if math.isnan(value) else max(0.0, value)


def figures_of(served: Served, slo: Slo) -> dict[str, float]:
    met = goodput(served, slo)
    return {name: getattr(met, name) for name in FIGURES}


def correct(served: Served, live: Served, simulated: Served) -> Served:
    """``served`` with the error of ``simulated`` against ``live``: times of equal rank are multiplied alike."""
    ttft_s = correct_by_rank(served.ttft_s(), live.ttft_s(), simulated.ttft_s())
    tpot_s = correct_by_rank(served.tpot_s(), live.tpot_s(), simulated.tpot_s())
    first_s = served.arrival_s + ttft_s
    rest_s = np.where(np.isfinite(tpot_s), tpot_s * np.maximum(served.output_tokens - 1, 0), 0.0)
    finish_s = np.where(np.isfinite(served.finish_s), first_s + rest_s, np.nan)
    return dataclasses.replace(served, first_token_s=first_s, finish_s=finish_s)


def correct_by_rank(values: Floats, live: Floats, simulated: Floats) -> Floats:
    """Each value times live over simulated at its rank; as it is where nothing is known."""
    live, simulated = (np.sort(column[np.isfinite(column)]) for column in (live, simulated))
    place = np.flatnonzero(np.isfinite(values))
    if not len(live) or not len(simulated) or not len(place):
        return values
    shares = (np.argsort(np.argsort(values[place], kind="stable"), kind="stable") + 0.5) / len(place)
    corrected = values.copy()
    corrected[place] *= np.quantile(live, shares) / np.maximum(np.quantile(simulated, shares), 1e-9)
    return corrected


def widen(share: float, requests: int, confidence: float, *, up: bool) -> float:
    """One end of Wilson's interval of a share of so many requests."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = share + z * z / (2 * requests)
    half = z * math.sqrt(share * (1 - share) / requests + z * z / (4 * requests * requests))
    return min(1.0, max(0.0, (middle + (half if up else -half)) / (1 + z * z / requests)))


def _part(served: Served, span: slice) -> Served:
    return Served(served.arrival_s[span], served.first_token_s[span], served.finish_s[span], served.output_tokens[span])


Tell = Callable[[str], None]


def predict_all(known: WhatIf, others: Sequence[Experiment], tell: Tell) -> list[dict[str, PredictedRange]]:
    """Raises ConfigError for the first that is outside of what was recorded, before any is run."""
    for other in others:
        check_other(known, other)
    answers = []
    for other in others:
        tell(f"{other.policy}, {other.instances} instances")
        answers.append(predict(known, other))
    return answers
