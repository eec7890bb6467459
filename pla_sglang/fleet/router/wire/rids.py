"""Under which ids instances know a request: relays send and abort by them, and so does the control plane."""

from __future__ import annotations

from collections.abc import Sequence

RID_PREFIX = "pla-"  # of the router's own request ids


def rid_at_instance(rid: str, reached: int) -> str:
    """The id of a request of which instances got ``reached`` attempts before.

    Each attempt has a new one, and none is the beginning of another: 2 s after a stream has ended, SGLang 0.5.17 aborts
    whatever has its id then (TokenizerManager.create_abort_task). Clients cannot use these ids.
    """
    return f"{RID_PREFIX}{reached + 1}~{rid}" if reached else rid


def find_rid(rid_there: str) -> tuple[str, int]:
    """What ``rid_at_instance`` made it from: the request's id, and how many attempts instances got before."""
    number, made, rid = rid_there.removeprefix(RID_PREFIX).partition("~")
    if not made or not rid_there.startswith(RID_PREFIX) or not number.isdecimal():
        return rid_there, 0
    return rid, int(number) - 1


def rids_at_instances(rid: str, rids: Sequence[str], *, prompts: int, reached: int) -> tuple[str, ...]:
    """The ids of all prompts of a request. ``rids``: the client's own ids for the prompts of a batch."""
    if rids:
        return tuple(rid_at_instance(named, reached) for named in rids)
    whole = rid_at_instance(rid, reached)
    return (whole,) if prompts == 1 else tuple(f"{whole}_{index}" for index in range(prompts))
