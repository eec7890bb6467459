"""Which requests have met their targets, as the control plane counts them by model and tenant."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.observability import request_series
from pla_sglang.fleet.router.control.observability.request_series import Judgement, RequestSeries, judge_targets
from pla_sglang.fleet.router.control.requests.prompts import Prompt
from pla_sglang.fleet.router.control.requests.request_record import End, RequestRecord, record_of
from pla_sglang.fleet.router.control.workers.served_names import MOST_NAMES, OTHER, ServedNames
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.fleet import RequestView
from pla_sglang.recording import file as recording
from pla_sglang.recording.rows import Ended

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NEITHER, MISSED, CUT_OFF = Judgement(), Judgement(False, failed=True), Judgement(True, False, failed=True)


def record(*, first_s: float | None = 0.5, **fields: Any) -> RequestRecord:
    """Arrived at 0 with targets of 1 s and 100 ms; ``fields``: of its question."""
    values = {"input_tokens": 50, "endpoint": m.Endpoint.CHAT, "stream": True} | fields
    endpoint, stream = values.pop("endpoint"), values.pop("stream")
    ask = m.Ask("r", 0, endpoint, stream, 0.0, 100, **values)
    made = record_of(
        ask, RequestView("r", 50, 0.0), Prompt(50, exact=True), default_ttft_slo_s=1.0, default_tpot_slo_s=0.1
    )
    made.present.first_token_s = first_s
    return made


def ended(outcome: m.Outcome = m.Outcome.OK, tokens: int | None = 11, status: int = 200) -> End:
    return End(outcome, status, "", tokens, exact_tokens=True)


@pytest.mark.parametrize(
    ("request_", "end", "last_s", "judged"),
    [
        pytest.param(record(), ended(), 1.4, Judgement(True, True, pytest.approx(0.09)), id="both met"),
        pytest.param(record(), ended(), 1.6, Judgement(True, False, pytest.approx(0.11)), id="slow tokens"),
        pytest.param(record(first_s=1.2), ended(), 1.3, Judgement(False, True, pytest.approx(0.01)), id="late"),
        pytest.param(record(ttft_slo_ms=400.0), ended(), 0.6, Judgement(False, True, pytest.approx(0.01)), id="own"),
        pytest.param(record(), ended(tokens=1), 0.5, Judgement(True), id="one token has no TPOT"),
        pytest.param(record(samples=2), ended(), 0.6, Judgement(True), id="nor have two answers"),
        pytest.param(record(stream=False), ended(), 0.6, NEITHER, id="no stream"),
        pytest.param(
            record(stream=False, first_s=None),
            ended(m.Outcome.UPSTREAM_LOST, 0, 502),
            None,
            Judgement(failed=True),
            id="failed",
        ),
        pytest.param(record(endpoint=m.Endpoint.EMBEDDINGS), ended(), 0.6, NEITHER, id="no tokens to come"),
        pytest.param(record(first_s=None), ended(m.Outcome.CLIENT_GONE, 0), None, NEITHER, id="left before"),
        pytest.param(
            record(), ended(m.Outcome.CLIENT_GONE), 0.7, Judgement(True, True, pytest.approx(0.02)), id="left later"
        ),
        pytest.param(record(), ended(m.Outcome.CLIENT_ERROR, 0, 400), 0.5, NEITHER, id="a bad request"),
        pytest.param(record(first_s=None), ended(m.Outcome.REFUSED, 0, 400), None, NEITHER, id="refused for itself"),
        pytest.param(record(first_s=None), ended(m.Outcome.REFUSED, 0, 429), None, MISSED, id="refused for load"),
        pytest.param(record(first_s=None), ended(m.Outcome.NO_INSTANCE, 0, 503), None, MISSED, id="nobody"),
        pytest.param(record(), ended(m.Outcome.INSTANCE_REFUSED, 0, 503), 0.5, MISSED, id="an error's byte"),
        pytest.param(record(first_s=None), ended(m.Outcome.TIMED_OUT, 0, 504), None, MISSED, id="timeout"),
        pytest.param(record(), ended(m.Outcome.UPSTREAM_LOST), 0.7, CUT_OFF, id="cut off"),
        pytest.param(record(), End(m.Outcome.RELAY_LOST), None, CUT_OFF, id="its relay is gone"),
        pytest.param(record(first_s=None), End(m.Outcome.RELAY_LOST), None, MISSED, id="and before"),
    ],
)
def test_each_kind_of_end(request_: RequestRecord, end: End, last_s: float | None, judged: Judgement) -> None:
    assert judge_targets(request_, end, request_.shown_attempt.first_token_s, last_s) == judged


def read(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for of in families for one in of.samples}


def find(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"pla_router_{name}", frozenset(labels.items())]


def count(series: RequestSeries, registry: CollectorRegistry) -> Samples:
    return read(generate_latest(registry).decode())


def test_tenants_beyond_the_bound_are_counted_as_one() -> None:
    registry = CollectorRegistry()
    series = RequestSeries(registry, most_pairs=3)
    for number in range(10):
        made = record(tenant=f"t{number}")
        series.note_first_token("m", made, 0.5)
        series.add_request("m", made, ended(), at_s=1.4, last_s=1.4)
    samples = count(series, registry)
    counted = {
        dict(labels)["tenant"]: value
        for (name, labels), value in samples.items()
        if name == "pla_router_requests_total"
    }
    assert counted == {"t0": 1, "t1": 1, "t2": 1, request_series.OTHER: 7}
    assert find(samples, "ttft_seconds_count", model="m", tenant="other") == 7
    assert find(samples, "targets_total", target="tpot", met="true", model="m", tenant="other") == 7


def test_what_is_made_of_a_key_is_no_tenant() -> None:
    registry = CollectorRegistry()
    series = RequestSeries(registry)
    for tenant in (None, "key-0123456789ab"):
        series.add_request("m", record(tenant=tenant), ended(), at_s=1.4)
    assert find(count(series, registry), "requests_total", end="finished", model="m", tenant="") == 2


class _Said:
    """What a description says of names."""

    def __init__(self, model: str, *adapters: str) -> None:
        self.model, self.adapters = model, frozenset(adapters)


def find_label(names: ServedNames, model: str = "", adapter: str | None = None) -> str:
    return names.find_label(record(model=model, adapter=adapter).ask)


def test_only_names_that_are_served_become_labels() -> None:
    names = ServedNames()
    assert find_label(names, "llama") == ""
    names.add(_Said("llama", "sql", "legal"))  # type: ignore[arg-type]
    assert [find_label(names, name) for name in ("llama", "", "gpt-4")] == ["llama"] * 3
    assert [find_label(names, name) for name in ("sql", "llama:legal")] == ["sql", "legal"]
    assert find_label(names, "llama", adapter="sql") == "sql"
    names.add(_Said("qwen"))  # type: ignore[arg-type]
    assert [find_label(names, name) for name in ("qwen", "llama", "gpt-4")] == ["qwen", "llama", ""]


def test_names_beyond_the_bound_are_other() -> None:
    names = ServedNames()
    names.add(_Said("llama", *(f"a{number:03}" for number in range(100))))  # type: ignore[arg-type]
    labels = [find_label(names, adapter=f"a{number:03}") for number in range(100)]
    assert labels == [f"a{number:03}" for number in range(MOST_NAMES - 1)] + [OTHER] * (101 - MOST_NAMES)


def finish(one: Scene, rid: str, *, ttft_s: float = 0.0, tokens: int = 11, **fields: Any) -> None:
    """A stream of tokens 10 ms apart."""
    one.assign(rid, ago_s=ttft_s, **fields)
    one.reach(rid, m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
    one.ended(rid, output_tokens=tokens, last_s=time.monotonic() + 0.01 * (tokens - 1))


async def test_a_scrape_says_whether_targets_are_met(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with scene(["null"], record=path) as one:
        finish(one, "fast", tenant="acme")
        finish(one, "late", tenant="acme", ttft_s=3.0)
        finish(one, "whole", tenant="acme", tokens=21)
        one.assign("gone", tenant="acme")
        one.ended("gone", m.Outcome.CLIENT_GONE, output_tokens=0)
        one.assign("lost", tenant="acme")
        one.ended("lost", m.Outcome.UPSTREAM_LOST, output_tokens=0)
        await one.at_rest()
        samples = read(one.admin("GET", "/metrics")[1])
        labels = {"model": "chain", "tenant": "acme"}
        targets = {
            (target, met): find(samples, "targets_total", target=target, met=met, **labels)
            for target in ("ttft", "tpot")
            for met in ("true", "false")
        }
        assert targets == {
            ("ttft", "true"): 2,
            ("ttft", "false"): 2,
            ("tpot", "true"): 3,
            ("tpot", "false"): 0,
        }
        assert find(samples, "requests_total", end="finished", **labels) == 3
        assert find(samples, "output_tokens_total", by="events", **labels) == 43
        assert find(samples, "input_tokens_total", **labels) > 0
        assert find(samples, "ttft_seconds_count", **labels) == find(samples, "request_seconds_count", **labels) == 3
        assert find(samples, "tpot_seconds_bucket", le="0.01", **labels) == 0
        assert find(samples, "tpot_seconds_bucket", le="0.02", **labels) == 3
    ends = [line for line in recording.read(path) if isinstance(line, Ended)]
    assert [(one.rid, one.end, one.failed, one.ttft_met, one.tpot_met) for one in ends] == [
        ("fast", "finished", False, True, True),
        ("late", "finished", False, False, True),
        ("whole", "finished", False, True, True),
        ("gone", "client_gone", False, None, None),
        ("lost", "upstream_error", True, False, None),
    ]
    assert ends[1].ttft_s == pytest.approx(3.0, abs=0.5)
