"""The rest of an answer, given how far it is: the median by the answers that have ended (Kaplan-Meier, JASA 1958).

    S(t) = product over lengths s <= t of 1 - ends(s) / at_risk(s)
    rest = the least t with S(t) <= S(generated) / 2, less ``generated``; at most ``max_tokens`` less ``generated``

``ends(s)`` counts answers that the model ended at s tokens; ``at_risk(s)`` those that were seen to come to s tokens.
Answers that run, were aborted, or were cut by ``max_tokens`` are censored: at risk up to where they are, ended nowhere.

Ends are kept in a window, so that a drift is followed. An answer that began before the window is at risk only from the
length that it had then (delayed entry); its tokens are taken to have come evenly. So the curve is fair however full the
window is. Were all at risk from their first token, it would not be: of a full window the ends alone are a fair sample,
and what runs would come on top.

There is a curve for each model and, within it, for each kind of request: what it says of itself. Where fewer than
``least_ends`` ends of a kind lie behind ``generated``, the curve of the whole model answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, deque
from typing import Any

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RemainingPredictor, RunningAnswers

Ints = npt.NDArray[np.int64]
# Limits up to 256 are short answers that were asked for, such as labels; from 4,096 on they are there for safety alone.
LIMIT_EDGES = (256, 4096)
PROMPT_EDGES = (512, 4096)
KINDS = 2 * (len(LIMIT_EDGES) + 1) * (len(PROMPT_EDGES) + 1)
STALE_S = 10.0  # what was seen to run longer ago may be gone with its instance
SPAN = float(1 << 24)  # above the length of any answer: one sorted column holds the lengths of all curves
SURE = 1e-12  # what is left of a curve where nobody at risk went on; those who came later still have one


@dataclasses.dataclass(frozen=True)
class SurvivalKnobs:
    """What is learned from.

    The median of n ends has the variance 1 / (4 n f^2), f being the density there; of an exponential rest of median m
    that is (1.44 m)^2 / n. It makes the mean absolute error greater by f times the variance, 0.72 / n of itself.

    Attributes:
        window_ends: ended answers kept. 4,096: the error is 0.02 % greater than that of the true median, and a fleet of
            10 requests/s forgets in 7 minutes.
        least_ends: of a kind, behind the tokens generated, for a curve of its own. 32: the error of the curve makes
            that of the prediction greater by 2 %, so a kind that differs by more is worth it.
        refit_share: curves are made again once so many ends have come, as a share of those kept. 1 % of the ends
            moves a median less than its error of 2.3 % in a full window.
    """

    window_ends: int = knob(4096, allowed=Range(1))
    least_ends: int = knob(32, allowed=Range(1))
    refit_share: float = knob(0.01, allowed=Range(0, 1))

    def __post_init__(self) -> None:
        check_fields(self, "survival")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Answers seen from ``entry`` to ``until`` tokens; ``ended``: the model ended them there. Shape [answers]."""

    entry: Floats
    until: Floats
    ended: npt.NDArray[np.bool_]

    def chosen(self, which: npt.NDArray[np.bool_]) -> Seen:
        return Seen(self.entry[which], self.until[which], self.ended[which])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurve:
    """The median length by tokens generated: ``median[i]`` from ``generated[i]`` (rising, first 0) up to the next.

    ``median``: nan where more than half go on beyond all that was seen. ``behind``: how many ends are longer.
    """

    generated: Floats
    median: Floats
    behind: Ints

    def spliced(self, whole: SurvivalCurve, least_ends: int) -> SurvivalCurve:
        """This one while it has that many ends behind, then ``whole``."""
        kept = int(np.searchsorted(-self.behind, -least_ends, side="right"))
        at = self.generated[kept] if kept < len(self.generated) else np.inf
        later = int(np.searchsorted(whole.generated, at, side="right"))
        joint = [] if at == np.inf else [later - 1]  # what holds at ``at`` begins there
        places = np.array([*joint, *range(later, len(whole.generated))], dtype=np.int64)
        generated = np.concatenate([self.generated[:kept], whole.generated[places]])
        if joint:
            generated[kept] = at
        return SurvivalCurve(
            generated,
            np.concatenate([self.median[:kept], whole.median[places]]),
            np.concatenate([self.behind[:kept], whole.behind[places]]),
        )


def fit_curve(seen: Seen) -> SurvivalCurve:
    """The curve of these answers, in any order. Without an end nothing is known."""
    seen = seen.chosen(seen.until > seen.entry)
    lengths, ends = np.unique(seen.until[seen.ended], return_counts=True)
    at_risk = np.searchsorted(np.sort(seen.entry), lengths) - np.searchsorted(np.sort(seen.until), lengths)
    falls = -np.log(np.maximum(1.0 - ends / at_risk, SURE))
    lost = np.concatenate([[0.0], np.cumsum(falls)])  # -log S, from each length up to the next
    halves = np.searchsorted(lost, lost + math.log(2) - 1e-9)
    generated = np.concatenate([[0.0], lengths])
    median = np.append(generated, np.nan)[halves]
    return SurvivalCurve(generated, median, int(ends.sum()) - np.concatenate([[0], np.cumsum(ends)]).astype(np.int64))


def kinds_of(prompt_tokens: Floats, limit_tokens: Floats, streamed: Floats) -> Ints:
    """The kind of each request, from 0."""
    found = (streamed > 0).astype(np.int64)
    for edge in LIMIT_EDGES:
        found += 2 * (limit_tokens > edge)
    for edge in PROMPT_EDGES:
        found += 2 * (len(LIMIT_EDGES) + 1) * (prompt_tokens > edge)
    return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CurveTable:
    """All curves in one column, so that one search serves requests of all kinds.

    Attributes:
        models: row of ``curve_of`` by name of the model.
        curve_of: the number of the curve; shape [models, kinds].
        keys: number of the curve times ``SPAN``, plus tokens generated; rising.
        medians: by key.
        reach: of each model, tokens that an answer was seen to come to.
    """

    models: dict[str, int]
    curve_of: Ints
    keys: Floats
    medians: Floats
    reach: Floats

    def medians_of(self, answers: RunningAnswers) -> Floats:
        """The median length of each; nan where nothing is known of its model, or half go on beyond what was seen."""
        kinds = kinds_of(answers.prompt_tokens, answers.limit_tokens, answers.streamed)
        if answers.models:
            rows = np.array([self.models.get(name, -1) for name in answers.models], dtype=np.int64)
            lengths = self._look_up(self.curve_of[rows, kinds], self.reach[rows], answers)
            return np.where(rows < 0, np.nan, lengths)
        row = self.models.get("")
        if row is None:
            return np.full(len(kinds), np.nan)
        return self._look_up(self.curve_of[row][kinds], self.reach[row], answers)

    def _look_up(self, curves: Ints, reach: Floats | np.float64, answers: RunningAnswers) -> Floats:
        wanted = curves * SPAN + np.minimum(answers.generated, SPAN - 1)
        lengths = self.medians[self.keys.searchsorted(wanted, side="right") - 1]
        # Where half go on beyond all that was seen, a limit within that is where they end.
        limits = np.where(answers.limit_tokens > reach, np.nan, answers.limit_tokens)
        return np.asarray(np.fmin(lengths, limits), dtype=np.float64)


class SurvivalPredictor(RemainingPredictor):
    """Learns while it serves: what the module says. Memory is bounded by the window and by what runs."""

    def __init__(self, knobs: SurvivalKnobs | None = None) -> None:
        self.knobs = knobs or SurvivalKnobs()
        self._ended: deque[EndedAnswer] = deque(maxlen=self.knobs.window_ends)
        self._running: dict[str, RunningAnswers] = {}  # by place
        self._observed = 0
        self._fitted = 0  # of ``_observed``, when the table was made
        self._table: CurveTable | None = None

    def observe_end(self, answer: EndedAnswer) -> None:
        if answer.tokens > 0:
            self._ended.append(answer)
            self._observed += 1

    def predict(self, answers: RunningAnswers) -> Floats:
        if self._observed - self._fitted > self.knobs.refit_share * len(self._ended):
            self._fit(answers.now_s)
        self._running[answers.place] = answers
        if self._table is None or not len(answers.rids):
            return np.full(len(answers.rids), np.nan)
        # What runs has a token to come.
        return np.maximum(self._table.medians_of(answers) - answers.generated, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """For operators: of the window, ended answers by model, those that the model ended, and curves in use."""
        return {
            "ended": len(self._ended),
            "whole": sum(answer.whole for answer in self._ended),
            "curves": 0 if self._table is None else int(self._table.curve_of.max(initial=-1)) + 1,
            "by_model": dict(Counter(answer.model for answer in self._ended)),
        }

    def _fit(self, now_s: float) -> None:
        self._fitted = self._observed
        self._running = {place: seen for place, seen in self._running.items() if now_s - seen.now_s <= STALE_S}
        names, kinds, seen = self._seen()
        models = {name: row for row, name in enumerate(dict.fromkeys(names))}
        rows = np.array([models[name] for name in names], dtype=np.int64)
        curve_of = np.zeros((len(models), KINDS), dtype=np.int64)
        curves: list[SurvivalCurve] = []
        reach = np.zeros(len(models))
        for row in models.values():
            of_model = rows == row
            whole = fit_curve(seen.chosen(of_model))
            reach[row] = seen.until[of_model].max()
            curve_of[row] = len(curves)
            curves.append(whole)
            ends = np.bincount(kinds[of_model & seen.ended], minlength=KINDS)
            for kind in np.flatnonzero(ends >= self.knobs.least_ends):
                curve_of[row, kind] = len(curves)
                own = fit_curve(seen.chosen(of_model & (kinds == kind)))
                curves.append(own.spliced(whole, self.knobs.least_ends))
        keys = np.concatenate([number * SPAN + curve.generated for number, curve in enumerate(curves)])
        self._table = CurveTable(models, curve_of, keys, np.concatenate([curve.median for curve in curves]), reach)

    def _seen(self) -> tuple[list[str], Ints, Seen]:
        """Model and kind of each answer that ended in the window or runs, and how far it was seen."""
        ended, running = self._ended, list(self._running.values())
        columns = np.array(
            [
                (one.tokens, one.whole, one.prompt_tokens, one.limit_tokens, one.streamed, one.started_s, one.ended_s)
                for one in ended
            ],
            dtype=np.float64,
        ).T
        more = [
            (
                seen.generated,
                np.zeros(len(seen.rids)),
                seen.prompt_tokens,
                seen.limit_tokens,
                seen.streamed,
                seen.started_s,
                np.full(len(seen.rids), seen.now_s),
            )
            for seen in running
        ]
        all_of = [np.concatenate(parts) for parts in zip(columns, *more, strict=True)]
        tokens, whole, prompts, limits, streamed, started_s, until_s = all_of
        names = [one.model for one in ended]
        names += itertools.chain.from_iterable(seen.models or [""] * len(seen.rids) for seen in running)
        # Before it is full, the window begins with the first answer of all.
        begin_s = min(one.ended_s for one in ended) if self._observed > len(ended) else -np.inf
        share = (begin_s - started_s) / np.maximum(until_s - started_s, 1e-9)
        entry = tokens * np.clip(share, 0.0, 1.0)
        return names, kinds_of(prompts, limits, streamed), Seen(entry, np.minimum(tokens, SPAN - 1), whole > 0)
