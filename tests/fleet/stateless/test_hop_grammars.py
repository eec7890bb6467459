"""The grammar of a request that goes on has all its tokens already; that of a decode part lacks the one it came
with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.requests import admission
from pla_sglang.fleet.stateless.transfer.legs import GOES_ON_ATTRIBUTE
from pla_sglang.plugin.engine.faults import Faults


class Grammar:
    """As llguidance's: it accepts tokens and notes none of them in ``current_token``."""

    current_token: int | None = None

    def __init__(self, *accepted: int) -> None:
        self.accepted = list(accepted)


def request(grammar: Grammar | None, *, goes_on: bool) -> Any:
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    req: Any = RequestFields(
        output_ids=[5, 6],
        kv_committed_len=11,
        grammar=grammar,
        update_finish_state=lambda: None,
        time_stats=SchedulerReqTimeStats(),
        finished=lambda: False,
    )
    setattr(req, GOES_ON_ATTRIBUTE, goes_on)
    return req


def join_as_the_host(scheduler: Any, reqs: list[Any]) -> Any:
    """What its ``process_prebuilt`` does with grammars."""
    for req in reqs:
        if req.grammar is not None and req.grammar.current_token is None:
            req.grammar.accepted.append(req.output_ids[-1])
    return SimpleNamespace(reqs=reqs, return_logprob=False, filter_batch=lambda: None, is_empty=lambda: False)


def test_a_grammar_gets_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "build_received_batch", join_as_the_host)
    monkeypatch.setattr(admission, "count_again", lambda batch, steps_under_way: None)
    held, leg = Grammar(5, 6), Grammar(5)
    reqs = [request(held, goes_on=True), request(leg, goes_on=False), request(None, goes_on=True)]
    scheduler = SimpleNamespace(output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: None))
    batch = admission.admit_received(scheduler, reqs, SimpleNamespace(is_empty=lambda: True), Faults())
    assert batch.reqs == reqs
    assert (held.accepted, leg.accepted) == ([5, 6], [5, 6])
