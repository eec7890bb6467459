"""Is what came back what one instance that nobody disturbs would have said?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.check.faults.answers import Shown, count_wrong_bytes, describe_difference, read_shown
from bench.check.faults.client import GONE, Stream
from bench.check.faults.fleet import Fleet
from bench.check.hops.rider import Ride
from bench.harness.replay import count_wrong_tokens

SHOWN_ERRORS = 5
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The answer to a body where it stays: its tokens, and what its client was shown."""

    ids: tuple[int, ...]
    shown: Shown


def make_references(rides: Iterable[Ride]) -> tuple[dict[str, Reference], list[str]]:
    """By the key of the body, from requests that were left alone; and what was wrong with these."""
    references, errors = {}, []
    for ride in rides:
        body = ride.life.body
        shown = read_shown(body.path, ride.answer.events)
        ids = tuple(ride.answer.ids) or shown.output_ids
        references[body.key] = Reference(ids, shown)
        if ride.ended != "whole" or shown.errors or shown.ends != 1:
            errors.append(f"left alone, {body.kind}: {ride.error} {shown.errors}")
        elif body.oracle is not None and ids != body.oracle:
            errors.append(
                f"left alone, {body.kind}: {count_wrong_tokens(body.oracle, ids)} tokens are not the oracle's"
            )
    return references, errors


def judge_rides(rides: Sequence[Ride], references: Mapping[str, Reference]) -> Row:
    """Counts of a part. A request that was aborted, or whose client left, has to have a beginning of the answer."""
    counts: Counter[str] = Counter()
    wrong_by_kind: Counter[str] = Counter()
    errors: list[str] = []
    for ride in rides:
        counts += ride.counts
        counts[ride.ended] += 1
        tokens, text = judge_answer(ride, references[ride.life.body.key])
        counts["tokens_wrong"] += tokens
        counts["bytes_wrong"] += text
        counts["tokens"] += len(ride.answer.ids)
        if tokens or text or ride.error:
            wrong_by_kind[ride.life.body.kind] += 1
            wanted = references[ride.life.body.key].shown
            where = describe_difference(wanted, read_shown(ride.life.body.path, ride.answer.events)) if text else ""
            errors.append(f"{describe(ride)}: {tokens} tokens and {text} bytes wrong {ride.error} {where}")
    return {
        "requests": len(rides),
        **{name: counts.pop(name, 0) for name in ("whole", "aborted", "left", "failed", "tokens")},
        **{name: counts.pop(name, 0) for name in ("hops", "redos", "tokens_wrong", "bytes_wrong")},
        "resumes": counts["resume"] + counts["forget"] + counts["cut_pull"],
        "events": dict(sorted(counts.items())),
        "pauses_s": [round(pause, 4) for ride in rides for pause in ride.pauses_s],
        "wrong_by_kind": dict(wrong_by_kind),
        "errors": errors[:SHOWN_ERRORS],
    }


def judge_answer(ride: Ride, wanted: Reference) -> tuple[int, int]:
    """Wrong tokens, and wrong bytes and fields."""
    ids = ride.answer.ids
    if ride.ended != "whole":
        return count_wrong_tokens(wanted.ids[: len(ids)], ids), 0
    return count_wrong_tokens(wanted.ids, ids), count_wrong_bytes(
        wanted.shown, read_shown(ride.life.body.path, ride.answer.events)
    )


def describe(ride: Ride) -> str:
    events = " ".join(f"{cut}:{event.value}" for cut, event in ride.life.events)
    return f"life {ride.life.index} ({ride.life.body.kind}, {ride.ended}, {events or 'no events'})"


def judge_routed(fleet: Fleet, streams: Sequence[Stream], references: Mapping[str, Reference]) -> Row:
    """Of streams through a router: tokens where the endpoint shows them, bytes and fields."""
    counts: Counter[str] = Counter()
    errors: list[str] = []
    for stream in streams:
        stream.settle()
        ended = "left" if stream.error == GONE else "aborted" if stream.rid in fleet.aborted else "whole"
        if ended == "whole" and (stream.status != 200 or stream.done_s is None):
            ended = "failed"
            errors.append(f"{stream.rid}: {stream.error}")
        counts[ended] += 1
        if ended == "whole":
            wanted, got = references[stream.body.key], read_shown(stream.body.path, stream.events)
            tokens = count_wrong_tokens(wanted.shown.output_ids, got.output_ids)
            wrong_bytes = count_wrong_bytes(wanted.shown, got) + stream.stray_bytes
            counts += Counter(tokens_wrong=tokens, bytes_wrong=wrong_bytes, tokens=len(wanted.ids))
            if tokens or wrong_bytes:
                errors.append(f"{stream.rid} ({stream.body.kind}): {tokens} tokens and {wrong_bytes} bytes wrong")
    names = ("whole", "aborted", "left", "failed", "tokens", "tokens_wrong", "bytes_wrong")
    return {name: counts[name] for name in names} | {"errors": errors[:SHOWN_ERRORS]}
