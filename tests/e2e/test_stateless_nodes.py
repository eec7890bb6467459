"""Two stateless instances whose two ranks are on two nodes each: both nodes are this machine here.

Each rank sends to the same rank of the other instance. HTTP, the bootstrap server and load reports are the first
node's. Both schedule by length, so that ranks that did not decide alike would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hop_commands import Instance, hold, hops, pull
from support.serving import Client, Prompt, outputs, until
from support.stateless_pair import Pair

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

NEW_TOKENS = 8
MOVED_TOKENS = 40
COMMON = (
    *("--device", "cpu", "--tp-size", "2", "--pla-stateless", "--disaggregation-transfer-backend", "nixl"),
    *("--chunked-prefill-size", "64", "--max-total-tokens", "4096"),
)
FIRST = ("--prefill-disagg", "temporal", "--pla-boundary", "32", "--enable-mixed-chunk")
SECOND = ("--prefill-disagg", "dopd")


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[Pair]:
    pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    model, servers = tiny_model("float32"), []
    for own in (FIRST, SECOND):
        meeting, bootstrap = f"127.0.0.1:{free_port()}", str(free_port())
        for rank in ("0", "1"):
            nodes = ("--nnodes", "2", "--node-rank", rank, "--dist-init-addr", meeting)
            server = forked(model, (*COMMON, *own, *nodes, "--disaggregation-bootstrap-port", bootstrap))
            server.bootstrap_port = int(bootstrap)
            servers.append(server)
    with serving(*servers):
        made = Pair(Instance("first", Client(servers[0])), Instance("second", Client(servers[2])))
        made.tell()
        yield made


def test_both_phases_of_a_request_at_either(pair: Pair, prompts: list[Prompt], expected: list[Prompt]) -> None:
    """Tokens are those of one process without ranks."""
    right = [tokens[:NEW_TOKENS] for tokens in expected[:6]]
    for source, target in ((pair.first, pair.second), (pair.second, pair.first)):
        assert outputs(source.client.submit(prompt, NEW_TOKENS) for prompt in prompts[:6]) == right
        assert outputs(pair.submit(source, target, prompt, NEW_TOKENS)[1] for prompt in prompts[:6]) == right
    pair.assert_at_rest()


def test_a_running_request_moves(pair: Pair, prompts: list[Prompt]) -> None:
    for source, target in ((pair.first, pair.second), (pair.second, pair.first)):
        whole = source.client.ask(prompts[4], MOVED_TOKENS)["output_ids"]
        held, room, answer = hold(source, prompts[4], new_tokens=MOVED_TOKENS)
        so_far = whole[: answer["tokens"]]
        body = pull(source, room, so_far, MOVED_TOKENS)
        assert target.client.ask(prompts[4], MOVED_TOKENS, **body)["output_ids"] == whole
        until(lambda source=source: hops(source)["by_state"] == {"sent": 1}, what="a request that was sent and is held")
        assert held.tell("resume", room) == {"status": "resumed"}
        assert held.ended.result()["output_ids"] == whole
    pair.assert_at_rest()
