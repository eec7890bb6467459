"""Replays a recording of a live policy in virtual time and compares every decision.

The recorded history is scheduled on the simulator's kernel: changes of views, arrivals, prefill passes, first tokens,
ends. A policy built afresh from the recording's header lives through it and is asked where the live one was asked. What
it answers is compared; it changes nothing, since the history holds what came of the live answer. So each decision is
judged on its own, with the same past, and the policy's inner state must agree all along.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from pla_sglang.errors import ConfigError
from pla_sglang.policy.decisions import Controller, PrefillSample
from pla_sglang.policy.fleet import FleetView, RequestView
from pla_sglang.policy.registry import PolicySet
from pla_sglang.recording import rows
from pla_sglang.recording.errors import RecordError
from pla_sglang.recording.views import restore
from pla_sglang.sim.kernel import Kernel, Priority


@dataclasses.dataclass(frozen=True)
class Difference:
    """One decision that came out otherwise. ``line`` counts from 1, the header."""

    line: int
    kind: str
    now_s: float
    live: rows.Answer
    replayed: rows.Answer


@dataclasses.dataclass
class Parity:
    """Outcome of a replay: decisions and identical ones by kind, and the first differences."""

    decisions: Counter[str] = dataclasses.field(default_factory=Counter)
    identical: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    differences: list[Difference] = dataclasses.field(default_factory=list)
    virtual_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.decisions.values())

    @property
    def identical_share(self) -> float:
        """Raises RecordError where there was nothing to decide: no share can be told."""
        if not self.count:
            raise RecordError("the recording holds no decision")
        return sum(self.identical.values()) / self.count


class Replay:
    """One replay of the lines after the header; ``run`` once.

    Args:
        policy: built from the header.
        lines: as recorded, in order.
        keep: how many differences to keep for people.

    Raises:
        RecordError: a line does not fit those before it.
    """

    def __init__(self, policy: PolicySet, lines: Iterable[rows.Line], *, keep: int = 20) -> None:
        self.result = Parity()
        self._policy = policy
        self._observers = policy.observers()
        self._kernel = Kernel()
        self._fleet = FleetView()
        self._requests: dict[str, RequestView] = {}
        self._keep = keep
        start_s: float | None = None
        for number, line in enumerate(lines, 2):
            if isinstance(line, rows.Header):
                raise RecordError(f"line {number}: a second header")
            start_s = line.now_s if start_s is None else start_s
            # One priority for all: what was recorded at one instant is replayed in the order of the lines.
            self._kernel.at(max(0.0, line.now_s - start_s), Priority.END, self._live, (number, line))

    def run(self) -> Parity:
        self._kernel.run()
        self.result.virtual_s = self._kernel.now_s
        self._fleet.check_integrity()
        return self.result

    def _live(self, event: tuple[int, rows.Line]) -> None:
        number, line = event
        try:
            self._handle(number, line)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise RecordError(f"line {number} does not fit those before it: {error!r}") from error

    def _handle(self, number: int, line: rows.Line) -> None:
        match line:
            case rows.Views():
                restore(self._fleet, line.changed)
            case rows.Arrival():
                self._arrive(line)
            case rows.Dispatched() | rows.Placed() | rows.Ticked():
                self._decide(number, line)
            case rows.Header():
                raise ValueError("a second header")
            case _:
                self._observe(line)

    def _arrive(self, line: rows.Arrival) -> None:
        request = RequestView(
            rid=line.rid,
            input_tokens=line.input_tokens,
            arrival_s=line.arrival_s,
            cached=line.cached,
            ttft_slo_s=line.ttft_slo_s,
            tpot_slo_s=line.tpot_slo_s,
            output_tokens=line.output_tokens,
            session=line.session,
        )
        self._requests[line.rid] = request
        for observer in self._observers:
            observer.on_arrival(request, line.now_s)

    def _observe(self, line: rows.Prefilled | rows.FirstToken | rows.Interval | rows.Finish) -> None:
        for observer in self._observers:
            match line:
                case rows.Prefilled():
                    sample = PrefillSample(
                        self._fleet.instances[line.instance],
                        *(line.new_tokens, line.attention, line.history_tokens, line.requests, line.duration_s),
                    )
                    observer.on_prefill(sample, line.now_s)
                case rows.FirstToken():
                    request = self._requests[line.rid]
                    request.predicted_ttft_s = line.predicted_ttft_s
                    observer.on_first_token(request, self._fleet.instances[line.instance], line.now_s)
                case rows.Interval():
                    observer.on_token_interval(self._fleet.instances[line.instance], line.interval_s, line.now_s)
                case rows.Finish():
                    observer.on_finish(self._requests[line.rid], line.output_tokens, line.now_s)
        if isinstance(line, rows.Finish):
            self._requests.pop(line.rid, None)

    def _decide(self, number: int, line: rows.Dispatched | rows.Placed | rows.Ticked) -> None:
        match line:
            case rows.Dispatched():
                request = self._requests[line.rid]
                if line.cached is not None:
                    request.cached = line.cached
                request.prefilled_on = None
                answer = rows.answer_of(self._policy.dispatcher.dispatch(request, self._fleet, line.now_s))
            case rows.Placed():
                request = self._requests[line.rid]
                place = line.prefilled_on
                request.prefilled_on = None if place is None else self._fleet.instances[place]
                answer = rows.answer_of(self._policy.dispatcher.place_decode(request, self._fleet, line.now_s))
            case rows.Ticked():
                controller: Controller = self._policy.controllers[line.controller]
                answer = rows.answer_of(controller.tick(self._fleet, line.now_s))
        self._compare(number, line, answer)

    def _compare(self, number: int, line: rows.Dispatched | rows.Placed | rows.Ticked, answer: rows.Answer) -> None:
        kind, result = type(line).__name__.lower(), self.result
        if isinstance(line, rows.Ticked) and not line.answer.actions and not answer.actions:
            return  # the controller has only looked
        result.decisions[kind] += 1
        result.reasons[line.answer.reason or str(_first_reason(line.answer))] += 1
        # The replayed answer goes through the same text as the live one: a tuple comes back as a list inside actions.
        if rows.normal(answer) == line.answer:
            result.identical[kind] += 1
        elif len(result.differences) < self._keep:
            result.differences.append(Difference(number, kind, line.now_s, line.answer, answer))


def _first_reason(answer: rows.Answer) -> object:
    return answer.actions[0][1] if answer.actions else "none"


def check_policy(header: rows.Header, names: Iterable[str]) -> None:
    """Raises ConfigError for a policy that this program does not have."""
    if header.policy not in names:
        raise ConfigError(f"the recording's policy {header.policy!r} is not known here")
