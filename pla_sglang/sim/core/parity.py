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
from typing import Any

import msgspec

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.decisions import PolicySet, PrefillSample
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, RequestView
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.runner import Effects, FleetRunner
from pla_sglang.recording import rows
from pla_sglang.recording.rows import RecordError
from pla_sglang.recording.views import restore, restore_batch
from pla_sglang.sim.core.kernel import Kernel, Priority

NOTHING_RUNS = DecodeBatch.of([])
DIFFERENCES_KEPT = 20  # for people


@dataclasses.dataclass(frozen=True)
class DecisionDifference:
    """One decision that came out otherwise. ``line`` counts from 1, the header."""

    line: int
    kind: str
    now_s: float
    live: rows.RecordedDecision
    replayed: rows.RecordedDecision


@dataclasses.dataclass
class Parity:
    """Outcome of a replay: decisions and identical ones by kind, and the first differences.

    Attributes:
        flips, flips_identical: changes of roles in the live decisions, and in those of them that came out the same.
    """

    decisions: Counter[str] = dataclasses.field(default_factory=Counter)
    identical: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    differences: list[DecisionDifference] = dataclasses.field(default_factory=list)
    flips: int = 0
    flips_identical: int = 0
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
        steps: of the header's setup.

    Raises:
        RecordError: a line does not fit those before it.
    """

    def __init__(self, policy: PolicySet, lines: Iterable[rows.Line], *, steps: StepTimes) -> None:
        self.result = Parity()
        self._steps = steps
        self._kernel = Kernel()
        self._batches: dict[int, DecodeBatch] = {}  # running requests by index of the instance
        self._fleet = FleetView(decodes=lambda instance: self._batches.get(instance.index, NOTHING_RUNS))
        # Nothing is carried out: what came of the live actions is in the lines.
        self._runner = FleetRunner(policy, self._fleet, Effects())
        self._requests: dict[str, RequestView] = {}
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
        instances, runner = self._fleet.instances, self._runner
        match line:
            case rows.Dispatched() | rows.Placed() | rows.Ticked():
                self._compare(number, line, self._decide(line))
            case rows.Views():
                restore(self._fleet, line.changed, self._steps)
                self._fleet.startup_s = line.startup_s
            case rows.Running():
                self._batches |= {index: restore_batch(batch) for index, batch in line.batches.items()}
            case rows.Moved() | rows.Ended() | rows.WorkerChanged() | rows.Planned():
                pass  # what came of orders: the views show it
            case rows.Arrival():
                request = self._requests[line.rid] = RequestView(**_reported(line))
                runner.arrive(request, line.now_s)
            case rows.Prefilled():
                sample = PrefillSample(**_reported(line) | {"instance": instances[line.instance]})
                runner.prefilled(sample, line.now_s)
            case rows.FirstToken():
                request = self._requests[line.rid]
                request.predicted_ttft_s = line.predicted_ttft_s
                runner.first_token(request, instances[line.instance], line.now_s)
            case rows.Interval():
                runner.token_interval(instances[line.instance], line.interval_s, line.now_s)
            case rows.Finish():
                runner.finish(self._requests.pop(line.rid), line.output_tokens, line.now_s)

    def _decide(self, line: rows.Dispatched | rows.Placed | rows.Ticked) -> rows.RecordedDecision:
        if isinstance(line, rows.Ticked):
            return rows.answer_of(self._runner.tick(line.controller, line.now_s))
        request = self._requests[line.rid]
        self._runner.hidden = frozenset(self._fleet.instances[index] for index in line.hidden)
        if isinstance(line, rows.Placed):
            place = line.prefilled_on
            request.prefilled_on = None if place is None else self._fleet.instances[place]
            return rows.answer_of(self._runner.place_decode(request, line.now_s))
        if line.cached is not None:
            request.cached = line.cached
        return rows.answer_of(self._runner.dispatch(request, line.now_s))

    def _compare(
        self, number: int, line: rows.Dispatched | rows.Placed | rows.Ticked, answer: rows.RecordedDecision
    ) -> None:
        kind, result = type(line).__name__.lower(), self.result
        if isinstance(line, rows.Ticked) and not line.answer.actions and not answer.actions:
            return  # the controller has only looked
        result.decisions[kind] += 1
        first_reason = str(line.answer.actions[0][1]) if line.answer.actions else "none"
        result.reasons[line.answer.reason or first_reason] += 1
        flips = sum(action[0] == rows.SET_ROLE for action in line.answer.actions)
        result.flips += flips
        # The replayed answer goes through the same text as the live one: a tuple comes back as a list inside actions.
        if rows.normal(answer) == line.answer:
            result.identical[kind] += 1
            result.flips_identical += flips
        elif len(result.differences) < DIFFERENCES_KEPT:
            result.differences.append(DecisionDifference(number, kind, line.now_s, line.answer, answer))


def _reported(line: rows.Arrival | rows.Prefilled) -> dict[str, Any]:
    """The fields of a line but its time: those of the object that was reported."""
    fields = msgspec.structs.asdict(line)
    del fields["now_s"]
    return fields


def check_policy(header: rows.Header, names: Iterable[str]) -> None:
    """Raises ConfigError for a policy that this program does not have."""
    if header.policy not in names:
        raise ConfigError(f"the recording's policy {header.policy!r} is not known here")
