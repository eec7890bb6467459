"""PD disaggregation over NIXL with the temporal policy on the prefill instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.load import FEW, FLAGS, LONGS, SHORTS, Reference, prompt_of
from support.serving import Client, Prompt, outputs

from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

_rooms = itertools.count(1)


@dataclass
class Pair:
    prefill: Client
    decode: Client

    def submit(
        self, prompt: Prompt, new_tokens: int, **body: Any
    ) -> tuple[Future[dict[str, Any]], Future[dict[str, Any]]]:
        """Send one request to both servers, as SGLang's load balancer does; the decode server answers it."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.server.bootstrap_port}
        body = body | room | {"bootstrap_room": next(_rooms)}
        return self.prefill.submit(prompt, new_tokens, **body), self.decode.submit(prompt, new_tokens, **body)


@pytest.fixture(scope="module")
def pair(
    reference: Reference,
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    fresh: Callable[..., Server],
    serving: Callable[..., Any],
) -> Iterator[Pair]:
    """The prefill instance is no fork: what it needs of a PD instance has to be found by freshly imported processes."""
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    common = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-mode")
    prefill = fresh(tiny_model("float32"), (*FLAGS, *common, "prefill"))
    decode = forked(tiny_model("float32"), ("--device", "cpu", "--enable-metrics", *common, "decode"))
    with serving(prefill, decode):
        yield Pair(Client(prefill), Client(decode))


def test_mixed_load(pair: Pair, reference: Reference) -> None:
    longs = [pair.submit(prompt, FEW) for prompt in LONGS]
    shorts = []
    for start in range(0, len(SHORTS), 8):
        pair.prefill.wait_for_chunk_or([prefill for prefill, _ in longs])
        shorts += [pair.submit(prompt, FEW) for prompt in SHORTS[start : start + 8]]
    outputs(prefill for prefill, _ in (*longs, *shorts))
    assert outputs(decode for _, decode in shorts) == [reference(prompt) for prompt in SHORTS]
    assert outputs(decode for _, decode in longs) == [reference(prompt) for prompt in LONGS]
    state = pair.prefill.state()
    assert state["mixed_batches"] == 0
    assert state["parks"] > 0


def test_abort_of_a_parked_chunk(pair: Pair, reference: Reference) -> None:
    prefill, decode = pair.submit(prompt_of(6000), FEW, rid="parked")
    pair.prefill.wait_for_chunk()
    shorts = [pair.submit(prompt, FEW) for prompt in SHORTS[4:12]]
    for side in (pair.prefill, pair.decode):
        side.abort("parked")
    for request in (prefill, decode):
        # Which error the two sides report depends on who hears of the abort first.
        assert (
            request.exception(timeout=60) is not None
            or request.result()["meta_info"]["finish_reason"]["type"] == "abort"
        )
    assert outputs(decode for _, decode in shorts) == [reference(prompt) for prompt in SHORTS[4:12]]
    again = pair.submit(LONGS[0], FEW)
    assert outputs(again)[1] == reference(LONGS[0])


def test_nothing_is_left(pair: Pair) -> None:
    pair.prefill.wait_until_idle()
    for side in (pair.prefill, pair.decode):
        side.flush()
        assert side.server.is_alive()
        assert "Traceback" not in side.server.log_text()
