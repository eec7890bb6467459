"""What became of each request, and whether it had a right to fail.

A request may fail that was at an instance when that was killed, or that was aborted. Where a request was is asked of
the router (/pla/explain), not guessed. One whose KV transfers were made to fail had no right to: the router has to
make another attempt.
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
CLOCK_S = 0.02  # between the end of an instance and the moment at which that was noticed here
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
    unexplained: int = 0  # neither of the last two
    tokens_wrong: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)

    @property
    def wrongly_failed(self) -> int:
        """Had no right to."""
        return self.failed - self.at_kill


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
        return
    if any(mark in text for mark in TRANSFER):
        verdict.by_transfer += 1
    else:
        verdict.unexplained += 1
    if len(verdict.examples) < SHOWN:
        times = {name: story.get(name) for name in ("arrived_s", "decided_s", "sent_s", "done_s", "ended_s")}
        where = f"{story.get('prefill')} {story.get('decode')} attempt {story.get('attempts')}"
        verdict.examples.append(f"{where} {story.get('end')} {times}: {text[:300]}")


def was_there(story: dict[str, Any], kill: Done, host: str) -> bool:
    """Whether the last attempt was in flight at the instance when that was killed.

    From its dispatch until the end of its part: at a prefill instance that is when its KV is with decode.
    """
    decided_s, done_s, ended_s = story.get("decided_s"), story.get("done_s"), story.get("ended_s")
    if decided_s is None or decided_s > kill.over_s + CLOCK_S:
        return False
    if host == story.get("decode"):
        return ended_s is None or ended_s >= kill.at_s
    return host == story.get("prefill") and all(end_s is None or end_s >= kill.at_s for end_s in (done_s, ended_s))
