"""What SGLang's own clock of a request says of one whose KV has come from another instance."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.requests import admission
from pla_sglang.plugin.engine.faults import Faults


def received_request() -> Any:
    """Up to where the host's transfer queue hands it over."""
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    stats = SchedulerReqTimeStats()
    req: Any = RequestFields(
        time_stats=stats,
        output_ids=[5],
        kv_committed_len=11,
        grammar=None,
        update_finish_state=lambda: None,
        finished=lambda: False,
    )
    stats.set_scheduler_recv_time()
    calls.note_receiving(req)
    stats.set_decode_transfer_queue_entry_time()
    stats.set_wait_queue_entry_time()
    return req


def join(reqs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = SimpleNamespace(reqs=reqs, return_logprob=False, filter_batch=lambda: None, is_empty=lambda: False)
    monkeypatch.setattr(admission, "build_received_batch", lambda scheduler, reqs: batch)
    monkeypatch.setattr(admission, "count_again", lambda batch, steps_under_way: None)
    scheduler = SimpleNamespace(output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: None))
    admission.admit_received(scheduler, reqs, SimpleNamespace(is_empty=lambda: True), Faults())


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
