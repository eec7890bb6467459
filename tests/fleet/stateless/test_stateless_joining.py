"""A request whose KV has come from another instance joins the running batch: its times, and its grammar."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.requests import admission
from pla_sglang.fleet.stateless.transfer.legs import GOES_ON_ATTRIBUTE
from pla_sglang.plugin.engine.faults import Faults


class Grammar:
    """As llguidance's: it accepts tokens and notes none of them in ``current_token``."""

    current_token: int | None = None

    def __init__(self, *accepted: int) -> None:
        self.accepted = list(accepted)


def received_request(grammar: Grammar | None = None, *, goes_on: bool = False) -> Any:
    """Up to where the host's transfer queue hands it over."""
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    stats = SchedulerReqTimeStats()
    req: Any = RequestFields(
        time_stats=stats,
        output_ids=[5, 6],
        kv_committed_len=11,
        grammar=grammar,
        update_finish_state=lambda: None,
        finished=lambda: False,
    )
    setattr(req, GOES_ON_ATTRIBUTE, goes_on)
    stats.set_scheduler_recv_time()
    calls.note_receiving(req)
    stats.set_decode_transfer_queue_entry_time()
    stats.set_wait_queue_entry_time()
    return req


def build_as_the_host(scheduler: Any, reqs: list[Any]) -> Any:
    """With what its ``process_prebuilt`` does with grammars."""
    for req in reqs:
        if req.grammar is not None and req.grammar.current_token is None:
            req.grammar.accepted.append(req.output_ids[-1])
    return SimpleNamespace(reqs=reqs, return_logprob=False, filter_batch=lambda: None, is_empty=lambda: False)


def join(reqs: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(admission, "build_received_batch", build_as_the_host)
    monkeypatch.setattr(admission, "count_again", lambda batch, steps_under_way: None)
    scheduler = SimpleNamespace(output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: None))
    return admission.admit_received(scheduler, reqs, SimpleNamespace(is_empty=lambda: True), Faults())


def test_its_queue_time_ends_when_it_joins_the_running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_s = time.perf_counter()
    req = received_request()
    join([req], monkeypatch)
    told = req.time_stats.convert_to_output_meta_info()
    assert 0 <= told["queue_time"] <= time.perf_counter() - begun_s
    assert told["forward_entry_time"] > 0
    assert "queue_duration=" in req.time_stats.convert_to_duration()


def test_its_running_time_begins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's time-out of running requests counts from then on."""
    req = received_request()
    monkeypatch.setattr(calls, "timeouts_s", lambda: (None, 0.0))
    assert not calls.has_run_too_long(req)
    join([req], monkeypatch)
    assert calls.has_run_too_long(req)


def test_each_stage_is_measured_once_as_at_a_decode_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, float] = {}
    queued_s: list[float] = []
    req = received_request()
    req.time_stats.set_metrics_collector(
        SimpleNamespace(observe_per_stage_req_latency=measured.setdefault, observe_queue_time=queued_s.append)
    )
    join([req], monkeypatch)
    assert measured.keys() == {"decode_waiting", "fake_output"}
    assert len(queued_s) == 1
    assert all(0 <= latency_s < 60 for latency_s in [*measured.values(), *queued_s])


def test_a_grammar_gets_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a request that goes on has all its tokens already; that of a decode part lacks the one it came with."""
    held, leg = Grammar(5, 6), Grammar(5)
    reqs = [received_request(held, goes_on=True), received_request(leg), received_request(goes_on=True)]
    assert join(reqs, monkeypatch).reqs == reqs
    assert (held.accepted, leg.accepted) == ([5, 6], [5, 6])
