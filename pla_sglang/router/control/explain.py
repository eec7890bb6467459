"""Why a request went where it went, and what its time to the first token was made of.

The stages lie end to end, so they add up to the TTFT:

    arrived ─ queue ─ decided ─ route ─ sent ─ prefill wait ─ prefill ─ done ─ transfer ─ first token ─ seen

Times between messages are measured. What lies between *sent* and *done* is one measured span; it is split by the
prefill time that the policy's predictor expects for the request alone, and so is what lies between *done* and *seen*
by the token interval of the decode instance. ``split`` says so. A unified instance reports no *done*: there the whole
span from *sent* to *seen* is wait and prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from pla_sglang.policy.fleet import InstanceView, RequestView
from pla_sglang.router.control.driver import Choice

SHOWN_CANDIDATES = 8
STAGES = ("queue_s", "route_s", "prefill_wait_s", "prefill_s", "transfer_s", "first_token_s")


class Former(msgspec.Struct, frozen=True, gc=False):
    """An attempt that came to nothing, before the one that the story tells."""

    prefill: str | None
    decode: str | None
    why: str
    detail: str


class Story(msgspec.Struct, gc=False):
    """One request, as it went. Times are those of the machine's monotonic clock; None: it did not come to that.

    Thousands are kept, and hold nothing that could point back to them: the garbage collector need not visit them.
    """

    rid: str
    arrived_s: float
    tenant: str = ""
    input_tokens: int = 0
    exact_tokens: bool = False
    cached_tokens: int = 0
    slo_ttft_s: float | None = None
    admission: str = ""
    attempts: int = 0
    former: list[Former] = []  # msgspec copies it
    reason: str = ""
    placement: str = ""
    prefill: str | None = None
    decode: str | None = None
    room: int | None = None
    predicted_ttft_s: float | None = None
    own_prefill_s: float | None = None  # expected for this request alone
    token_interval_s: float | None = None  # of the decode instance at the time
    actions: tuple[str, ...] = ()
    candidates: tuple[tuple[str, int, int], ...] = ()  # name, queued and cached tokens
    decided_s: float | None = None
    sent_s: float | None = None
    done_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None
    end: str | None = None
    status: int = 0  # of the answer; 0: there was none
    detail: str = ""


def note_retry(story: Story, why: str, detail: str) -> None:
    """The attempt is over; what is known of it moves to ``former``. Its time counts as queueing."""
    story.former.append(Former(story.prefill, story.decode, why, detail))
    story.decided_s = story.sent_s = story.done_s = None


def note_choice(
    story: Story,
    view: RequestView,
    choice: Choice,
    ready: Sequence[InstanceView],
    own_prefill_s: float | None,
) -> None:
    """What the policy chose, and what it could have chosen."""
    story.attempts += 1
    story.reason, story.placement = choice.reason.value, choice.placement.value
    story.prefill, story.decode = choice.prefill.name, choice.decode.name
    story.cached_tokens = view.history_tokens(choice.prefill)
    story.predicted_ttft_s = view.predicted_ttft_s
    story.token_interval_s = choice.decode.token_interval_s
    actions = choice.actions
    story.actions = tuple([f"{type(one).__name__}:{one.reason.value}" for one in actions]) if actions else ()
    story.own_prefill_s = own_prefill_s
    cached = view.cached
    story.candidates = tuple(
        [(one.name, one.queued_tokens, cached.get(one.index, 0)) for one in ready[:SHOWN_CANDIDATES]]
    )


def stages(story: Story) -> dict[str, float] | None:
    """As ``stage_seconds``, by name."""
    seconds = stage_seconds(story)
    return None if seconds is None else dict(zip(STAGES, seconds, strict=True))


def stage_seconds(story: Story) -> tuple[float, float, float, float, float, float] | None:
    """Seconds by stage, in the order of ``STAGES``; their sum is the TTFT. None before the first token.

    Reports of several processes may cross; a time that would lie before its predecessor is taken to be at it.
    """
    if story.first_s is None:
        return None
    arrived_s = story.arrived_s
    seen_s = max(story.first_s, arrived_s)
    decided_s = _between(arrived_s, story.decided_s, seen_s)
    sent_s = _between(decided_s, story.sent_s, seen_s)
    split = story.decode is not None and story.decode != story.prefill
    done_s = _between(sent_s, story.done_s, seen_s) if split and story.done_s is not None else seen_s
    prefill_s = done_s - sent_s if story.own_prefill_s is None else min(done_s - sent_s, story.own_prefill_s)
    last_s = min(seen_s - done_s, story.token_interval_s or 0.0)
    return (
        decided_s - arrived_s,
        sent_s - decided_s,
        done_s - sent_s - prefill_s,
        prefill_s,
        seen_s - done_s - last_s,
        last_s,
    )


def _between(low_s: float, time_s: float | None, high_s: float) -> float:
    if time_s is None or time_s < low_s:
        return low_s
    return time_s if time_s < high_s else high_s


class ExplainStore:
    """The latest stories, the oldest forgotten first."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def open(self, story: Story) -> None:
        stories = self._stories
        if story.rid in stories:
            stories.move_to_end(story.rid)
        stories[story.rid] = story
        if len(stories) > self._capacity:
            stories.popitem(last=False)

    def get(self, rid: str) -> Story | None:
        return self._stories.get(rid)

    def explain(self, rid: str) -> dict[str, Any] | None:
        """Everything about a request; None if it is not known (any more)."""
        story = self._stories.get(rid)
        if story is None:
            return None
        told = msgspec.structs.asdict(story)
        told["former"] = [msgspec.structs.asdict(one) for one in story.former]
        told["candidates"] = {
            name: {"queued_tokens": queued, "cached_tokens": cached} for name, queued, cached in story.candidates
        }
        parts = stages(story)
        if parts is not None and story.first_s is not None:
            told["ttft_s"] = max(story.first_s, story.arrived_s) - story.arrived_s
            told["stages"] = parts
            told["split"] = {"prefill_wait_s, prefill_s": "predicted", "transfer_s, first_token_s": "predicted"}
        return told
