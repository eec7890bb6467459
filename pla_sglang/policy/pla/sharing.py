"""Who shares a prefill pass: a question of device seconds (in place of PLA-Serve's rule that classes never share one).

A pass costs more than its tokens (``StepModel``): small ones are dear. A request that joins a pass saves most of a pass
of its own, to all who wait behind; and it makes the pass longer, for all who are in it. With n requests in the pass,
N behind it or in it, D the seconds that it adds and S those that it saves (its pass alone, less D), it joins where

    (N - n) * S / (n + 1)  >=  n * D

The left side has only a part of S because the pass that it would have otherwise is shared too, by about as many. For
N requests of one size, and c seconds a pass beside b a request, this gives passes of sqrt(N*c/b) requests, at which
their mean time is least.

N counts who waits and, by the arrival rate, who comes while that is worked off: they wait for the same seconds.

A chunk of a long joins by the same rule, with all of S: nobody else would share its pass. S and D both grow with its
tokens, so it takes all that the others leave of the pass, or nothing.

In the paper's regime, few requests waiting and long prompts that are many times larger than short prompts, D is
hundreds of milliseconds and S a few: nothing shares a pass, as in section 3.2. Under load, and among requests of
similar size, the rule fills passes as stock SGLang does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.graphs.batching import computed_tokens
from pla_sglang.policy.pla.graphs.layouts import Layout

# Candidates in a row that do not join; a look at more of them is not worth its time. One that would join is found
# behind 15 others, with half and twice as much behind 7 and 31.
MOST_REFUSED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class PassContents:
    """What a pass computes.

    Attributes:
        lengths: new tokens of each of its requests.
        history_tokens, attention: summed, as ``StepModel`` has them.
    """

    lengths: tuple[int, ...] = ()
    history_tokens: int = 0
    attention: float = 0.0

    def with_part(self, new_tokens: int, history_tokens: int) -> PassContents:
        """``new_tokens`` of one more request."""
        return PassContents(
            (*self.lengths, new_tokens),
            self.history_tokens + history_tokens,
            self.attention + new_tokens * (new_tokens + 2 * history_tokens),
        )

    def step_s(self, model: StepModel, layout: Layout | None = None) -> float:
        """Predicted seconds; ``layout``: captured graphs, which compute their whole bucket."""
        return model.step_s(computed_tokens(layout, self.lengths), self.history_tokens, self.attention)


def contents_of(batch: Iterable[WaitingView]) -> PassContents:
    """A pass over these, whole."""
    return contents_of_parts((view, view.new_tokens) for view in batch)


def contents_of_parts(parts: Iterable[tuple[WaitingView, int]]) -> PassContents:
    """A pass over so many new tokens of each."""
    lengths: list[int] = []
    history_tokens, attention = 0, 0.0
    for view, tokens in parts:
        past = view.history_tokens
        lengths.append(tokens)
        history_tokens += past
        attention += tokens * (tokens + 2 * past)
    return PassContents(tuple(lengths), history_tokens, attention)


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """The rule above, for one pass.

    Attributes:
        concerned: N, those who wait or are expected while what waits is worked off.
        model: step times of this pass.
        layout: of captured graphs; None: there are none.
    """

    concerned: float
    model: StepModel
    layout: Layout | None = None

    def take_companions(
        self, contents: PassContents, others: Iterable[WaitingView], *, budget_tokens: int, slots: int
    ) -> list[WaitingView]:
        """Those of ``others``, in their order, that join whole. ``budget_tokens``, ``slots``: of the pass in all."""
        taken: list[WaitingView] = []
        refused = 0
        room_tokens, pass_s = budget_tokens - sum(contents.lengths), contents.step_s(self.model, self.layout)
        for view in others:
            if len(contents.lengths) >= slots or room_tokens <= 0 or refused >= MOST_REFUSED:
                break
            refused += 1
            if view.new_tokens > room_tokens:
                continue
            joint = contents.with_part(view.new_tokens, view.history_tokens)
            joint_s = joint.step_s(self.model, self.layout)
            alone_s = contents_of((view,)).step_s(self.model, self.layout)
            count, added_s = len(contents.lengths), joint_s - pass_s
            if (self.concerned - count) * (alone_s - added_s) < count * (count + 1) * added_s:
                continue
            taken.append(view)
            contents, pass_s, refused = joint, joint_s, 0
            room_tokens -= view.new_tokens
        return taken

    def takes_chunk(self, contents: PassContents, long: WaitingView, tokens: int, usual_tokens: int) -> bool:
        """``tokens`` of ``long`` join. ``usual_tokens``: of the chunk that it would have to itself."""
        history, usual = long.history_tokens, max(tokens, usual_tokens)
        alone_s = PassContents().with_part(usual, history).step_s(self.model) * tokens / usual
        added_s = contents.with_part(tokens, history).step_s(self.model) - contents.step_s(self.model, self.layout)
        count = len(contents.lengths)
        return (self.concerned - count) * (alone_s - added_s) >= count * added_s
