"""Spans of requests, from a router's processes to a collector that decodes what it gets."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority, client_context
from support.collector import Collector, Seen, collector
from support.router_process import RouterProcess, router_process
from support.serving import until

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.observability.tracing import EXPORT_TIMEOUT_S
from pla_sglang.fleet.router.relay.request_translation import IdGenerator

SECRET, PROMPT = "hunter2-secret-key", "the prompt that nobody else may see"
KEY = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL, ERROR = 2, 1, 2  # of the protocol's enums
STAGES = ["queue", "route", "prefill_wait", "prefill", "transfer", "first_token"]


@pytest.fixture(scope="module")
def collected() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def router(collected: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """A relay and a control process in front of a prefill and a decode instance."""
    arguments = ["--relay-workers", "1", "--policy", "minimal-load", "--api-key", SECRET, "--max-open-requests", "8"]
    arguments += ["--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{collected.port}"]
    with router_process(["prefill", "decode"], arguments, tmp_path_factory.mktemp("traced")) as running:
        yield running


def ask(router: RouterProcess, rid: str, path: str = "/generate", **headers: str) -> int:
    body = {"rid": rid, "text": PROMPT, "prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    return router.ask(path, json.dumps(body | {"stream": True}).encode(), KEY | headers)[0]


def tree(collected: Collector, rid: str) -> tuple[Seen, list[Seen]]:
    return until(lambda: collected.trees().get(rid), what=f"spans of {rid}", patience_s=20)


def test_a_request_is_a_tree_under_its_clients_span(router: RouterProcess, collected: Collector) -> None:
    assert ask(router, "mine", traceparent=f"00-{TRACE}-{SPAN}-01") == 200
    whole, parts = tree(collected, "mine")
    assert (whole.name, whole.kind, whole.trace, whole.parent) == ("POST /generate", SERVER, TRACE, SPAN)
    assert {part.trace for part in parts} == {TRACE}
    assert {part.kind for part in parts} == {INTERNAL}
    assert len({span.id for span in (whole, *parts)} | {SPAN}) == len(parts) + 2
    for one in router.fakes:  # engines with --enable-trace go on under our span
        assert one.traces[-1] == f"00-{TRACE}-{whole.id}-01"
    assert whole.resource["service.name"] == "pla-sglang-router"
    expected = {
        "http.request.method": "POST",
        "http.route": "/generate",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "pla.policy": "minimal-load",
        "pla.end": "finished",
        "pla.attempts": 1,
    }
    assert {name: whole.attributes.get(name) for name in expected} == expected
    chosen = [whole.attributes["pla.prefill"], whole.attributes["pla.decode"]]
    assert chosen == [f"127.0.0.1:{one.port}" for one in router.fakes]


def test_stages_add_up_to_the_ttft_that_explain_tells(router: RouterProcess, collected: Collector) -> None:
    started_ns = time.time_ns()
    assert ask(router, "staged") == 200
    ended_ns = time.time_ns()
    whole, parts = tree(collected, "staged")
    told = json.loads(router.ask("/pla/explain/staged", headers=KEY)[1])
    assert [part.name for part in parts] == [name for name in STAGES if told["stages"][f"{name}_s"] > 0]
    assert {"queue", "route", "prefill"} <= {part.name for part in parts}
    assert parts[0].start_ns == whole.start_ns
    assert [part.end_ns for part in parts[:-1]] == [part.start_ns for part in parts[1:]]
    ttft_ns = sum(part.end_ns - part.start_ns for part in parts)
    assert ttft_ns == pytest.approx(told["ttft_s"] * 1e9, abs=1000)
    assert whole.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(told["ttft_s"])
    assert whole.attributes["pla.reason"] == told["reason"]
    assert started_ns - 1e7 <= whole.start_ns < parts[-1].end_ns <= whole.end_ns <= ended_ns + 1e9


@pytest.mark.parametrize("relays", ["0", "1"])
def test_the_scheme_is_that_of_clients(collected: Collector, tmp_path: Path, relays: str) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("router")
    arguments = ["--relay-workers", relays, "--tls-cert-path", str(cert), "--tls-key-path", str(key)]
    arguments += ["--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{collected.port}"]
    with router_process(["null"], arguments, tmp_path, tls=client_context(authority.ca)) as secure:
        assert ask(secure, f"secure-{relays}") == 200
        assert tree(collected, f"secure-{relays}")[0].attributes["url.scheme"] == "https"


@pytest.mark.parametrize(
    ("path", "operation"), [("/v1/completions", "text_completion"), ("/v1/chat/completions", "chat")]
)
def test_names_by_route(router: RouterProcess, collected: Collector, path: str, operation: str) -> None:
    assert ask(router, f"at{path}", path) == 200
    whole, _ = tree(collected, f"at{path}")
    assert (whole.name, whole.attributes["gen_ai.operation.name"]) == (f"POST {path}", operation)
    assert whole.parent == ""
    assert router.fakes[1].traces[-1] == f"00-{whole.trace}-{whole.id}-01"


def test_a_client_that_does_not_sample_gets_no_spans(router: RouterProcess, collected: Collector) -> None:
    quiet = f"00-{TRACE}-{SPAN}-00"
    assert ask(router, "quiet", traceparent=quiet) == 200
    assert router.fakes[1].traces[-1] == quiet
    assert ask(router, "loud") == 200
    tree(collected, "loud")
    assert "quiet" not in collected.trees()


def test_an_instance_that_fails_makes_an_error(router: RouterProcess, collected: Collector) -> None:
    router.fakes[1].script.status = 500
    try:
        assert ask(router, "broken") == 500
    finally:
        router.fakes[1].script.status = 200
    whole, parts = tree(collected, "broken")
    assert (whole.status, whole.attributes["error.type"]) == (ERROR, "upstream_error")
    assert whole.attributes["http.response.status_code"] == 500
    assert {part.status for part in parts} == {0}


def test_no_secret_and_no_prompt_is_in_any_span(router: RouterProcess, collected: Collector) -> None:
    """Runs last, over all that the tests above have sent."""
    assert ask(router, "last", **{"x-tenant-id": "tenant-of-ours"}) == 200
    tree(collected, "last")
    shown = repr(collected.spans)
    assert "last" in shown
    for word in (SECRET, "Bearer", PROMPT, "key-", "tenant-of-ours"):
        assert word not in shown


def test_what_is_left_is_sent_at_the_end(tmp_path: Path) -> None:
    with collector() as collected:
        arguments = ["--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{collected.port}"]
        with router_process(["null"], arguments, tmp_path) as router:
            assert ask(router, "parting") == 200
            assert router.stop() == 0
        assert "parting" in collected.trees()


def test_a_collector_that_is_away_disturbs_nobody(tmp_path: Path) -> None:
    arguments = ["--relay-workers", "1", "--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{free_port()}"]
    with router_process(["null"], arguments, tmp_path) as router:
        before = router.processes()
        for number in range(30):
            assert ask(router, f"r{number}") == 200
        until(lambda: "exporting traces" in router.log, what="a word about the collector", patience_s=20)
        assert min(ask_for_s(router, f"late-{number}") for number in range(3)) < 2.0
        assert router.processes() == before
        assert json.loads(router.ask("/pla/ledger")[1])["balanced"]
        started_s = time.monotonic()
        assert router.stop() == 0
        assert time.monotonic() - started_s < EXPORT_TIMEOUT_S, "nothing waits for a batch that is on its way"
        assert "Traceback" not in router.log


def ask_for_s(router: RouterProcess, rid: str) -> float:
    """How long an answer takes. A busy machine only adds to that, so the shortest of several counts."""
    started_s = time.monotonic()
    assert ask(router, rid) == 200
    return time.monotonic() - started_s


def test_the_span_is_ours_and_the_trace_is_the_clients() -> None:
    ids = IdGenerator(random.Random(1))
    trace, parent = ids.make_span(f"00-{TRACE}-{SPAN}-03", 0.0)  # a share is for those without a trace
    assert (trace[:36], trace[52:], parent) == (f"00-{TRACE}-", "-03", SPAN)
    assert trace[36:52] != SPAN
    assert ids.make_span(f"00-{TRACE}-{SPAN}-02", 1.0) == (f"00-{TRACE}-{SPAN}-02", None)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_a_share_of_the_others(share: float, low: int, high: int) -> None:
    ids = IdGenerator(random.Random(1))
    made = [ids.make_span("", share) for _ in range(1000)]
    assert len({trace for trace, _ in made}) == 1000
    assert low <= sum(parent == "" for _, parent in made) <= high
    assert all(trace.endswith("-00" if parent is None else "-01") for trace, parent in made)


OFF = """
import asyncio, sys
from pla_sglang import launch_router
from pla_sglang.fleet.router import relay
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs

async def work():
    plane = ControlPlane(ControlKnobs({knobs}))
    await plane.start()
    await plane.stop()

asyncio.run(work())
print(sorted(name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "grpc")))
"""


def test_off_means_not_even_imported() -> None:
    def imported(knobs: str) -> str:
        script = OFF.replace("{knobs}", knobs)
        return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout

    assert imported("").strip() == "[]"
    assert "opentelemetry.sdk.trace" in imported("enable_trace=True, collector='127.0.0.1:1'")


def test_without_the_packages_it_does_not_start() -> None:
    script = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from pla_sglang.launch_router import main\n"
        "sys.exit(main(['--enable-trace', '--worker', 'http://127.0.0.1:1']))"
    )
    refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert refused.returncode == EXIT_BAD_ARGUMENTS
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc" in refused.stderr


@pytest.mark.parametrize(
    "knobs", [{"collector": "collector"}, {"collector": "http://a:1"}, {"collector": "a:65536"}, {"trace_share": 2}]
)
def test_bad_values(knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ControlKnobs(**knobs)
