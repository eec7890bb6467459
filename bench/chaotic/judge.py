"""What became of each request, and whether it had a right to fail.

A request may fail that was at an instance when that was killed, whose KV transfer was made to fail, or that was
aborted. Where a request was is asked of the router (/pla/explain), not guessed.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from bench.chaotic.faults import Done, Fault, Faults
from bench.replaying.client import Record
from bench.replaying.result import count_wrong
from bench.replaying.rough import GONE

TRANSFER = ("KVTransferError", "KV transfer", "Prefill transfer failed", "Decode transfer failed", "bootstrap failed")
GRACE_S = 0.5  # between an instance's death and the end of its requests
SHOWN = 5


@dataclasses.dataclass
class Verdict:
    """Counts over all requests."""

    completed: int = 0
    failed: int = 0  # none of the next two
    gone: int = 0
    aborted: int = 0
    at_kill: int = 0
    by_transfer: int = 0
    unexplained: int = 0
    tokens_wrong: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)


def judge(records: Sequence[Record], faults: Faults, described: dict[str, Any], *, prefix: str) -> Verdict:
    """While the router is still there to be asked."""
    verdict, aborted = Verdict(), faults.aborted()
    kills = [one for one in faults.done if one.kind is Fault.KILL]
    hosts = {one["name"]: one["url"].removeprefix("http://") for one in described["instances"]}
    for record in records:
        rid = f"{prefix}-{record.planned.index:06d}"
        if record.error is None:
            verdict.completed += 1
            verdict.tokens_wrong += count_wrong(record)
        elif record.error == GONE:
            verdict.gone += 1
        elif rid in aborted:
            verdict.aborted += 1
        else:
            verdict.failed += 1
            _explain(verdict, record.error, told(described["url"], rid), kills, hosts)
    return verdict


def told(url: str, rid: str) -> dict[str, Any]:
    """The router's story of a request; empty if it knows none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        found: dict[str, Any] = json.loads(opener.open(f"{url}/pla/explain/{rid}", timeout=30).read())
    except urllib.error.HTTPError:
        return {}
    return found


def _explain(verdict: Verdict, error: str, story: dict[str, Any], kills: Sequence[Done], hosts: dict[str, str]) -> None:
    text = f"{error} {story.get('detail', '')}"
    if any(was_there(story, one, hosts[one.name]) for one in kills):
        verdict.at_kill += 1
    elif any(mark in text for mark in TRANSFER):
        verdict.by_transfer += 1
    else:
        verdict.unexplained += 1
        if len(verdict.examples) < SHOWN:
            verdict.examples.append(f"{story.get('prefill')} {story.get('decode')} {story.get('end')}: {text[:200]}")


def was_there(story: dict[str, Any], kill: Done, host: str) -> bool:
    """Whether the request was at the instance when that was killed."""
    if host not in (story.get("prefill"), story.get("decode")):
        return False
    ended_s = story.get("ended_s")
    started = story["arrived_s"] <= kill.at_s + GRACE_S
    return started and (ended_s is None or ended_s >= kill.at_s - GRACE_S)
