"""One server whose two data-parallel ranks are a short and a long pool: real processes, every answer compared.

The reference is one unified stock server. The TTFT target is long, so that nothing spills over to the other pool unless
a test makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from support.load import FEW, LONGS, SHORTS, Reference, prompt_of
from support.serving import Client, aborted, until

from pla_sglang.testing.server import fetch

pytestmark = pytest.mark.e2e

KEY = "only-for-tests"
SHORT_RANK, LONG_RANK = 0, 1
FLAGS = ("--prefill-disagg", "spatial", "--dp-size", "2", "--pla-slo-ttft-ms", "600000")


class Spatial(Client):
    """The same client, with the ranks and pools of one server."""

    def full_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._get("/pla/state")
        return state

    def _get(self, path: str) -> Any:
        return fetch(self.server.url + path, headers=self.headers)

    def dispatched(self) -> int:
        """Requests that the controller has sent to a rank of its choice."""
        return sum(self.full_state()["pools"]["dispatched"].values())

    def ranks(self) -> list[dict[str, Any]]:
        return [entry["role"] for entry in self.full_state()["schedulers"]]

    def chunk_left(self) -> int:
        return max(int(one["chunk_remaining_tokens"]) for one in self.full_state()["schedulers"])

    def set_role(self, role: str, rank: int) -> None:
        self.server.post("/pla/role", {"role": role, "dp_rank": rank}, headers=self.headers)


@pytest.fixture(scope="module")
def client(reference: Reference, temporal: Callable[..., Any]) -> Iterator[Spatial]:
    with temporal(*FLAGS, admin_key=KEY, is_fresh=True) as plain:
        yield Spatial(plain.server, plain.admin_key)


def rank_of(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["dp_rank"])


def check(answers: list[Future[dict[str, Any]]], prompts: list[list[int]], reference: Reference) -> list[int]:
    """Every answer is the unified server's; gives the ranks."""
    done = [answer.result(timeout=180) for answer in answers]
    assert [one["output_ids"] for one in done] == [reference(prompt) for prompt in prompts]
    return [rank_of(one) for one in done]


def test_requests_go_to_the_pool_of_their_length(client: Spatial, reference: Reference) -> None:
    client.flush()
    longs = [client.submit(prompt, FEW) for prompt in LONGS[:4]]
    shorts = [client.submit(prompt, FEW) for prompt in SHORTS]
    assert set(check(shorts, SHORTS, reference)) == {SHORT_RANK}
    assert set(check(longs, LONGS[:4], reference)) == {LONG_RANK}
    state = client.full_state()
    assert [one["role"]["role"] for one in state["schedulers"]] == ["short", "long"]
    assert [one["strays"] for one in state["schedulers"]] == [{}, {}]
    assert state["pools"]["dispatched"]["pla.long"] >= 4
    assert state["pools"]["dispatched"]["pla.short"] >= len(SHORTS)
    assert state["pools"]["moves"] == {}
    assert all("seams verified" in one["hooks"] for one in state["schedulers"])
    assert [one["reports_lost"] for one in state["pools"]["ranks"]] == [0, 0]
    info = client.server.get("/server_info")
    # SGLang lists ranks in the order of their answers.
    assert sorted(one["pla"]["role"]["role"] for one in info["internal_states"]) == ["long", "short"]


def test_a_stray_is_served(client: Spatial, reference: Reference) -> None:
    """A long that names the short rank, and shorts beside it."""
    client.flush()
    stray = client.submit(LONGS[0], FEW, routed_dp_rank=SHORT_RANK)
    client.wait_for_chunk_or([stray])
    shorts = [client.submit(prompt, FEW) for prompt in SHORTS[4:12]]
    assert set(check([*shorts, stray], [*SHORTS[4:12], LONGS[0]], reference)) == {SHORT_RANK}
    state = client.full_state()
    assert state["schedulers"][SHORT_RANK]["strays"] == {"long": 1}
    assert state["schedulers"][SHORT_RANK]["mixed_batches"] == 0
    assert state["pools"]["external"] == 1


def test_a_role_changes_while_requests_wait(client: Spatial, reference: Reference) -> None:
    """``fresh`` prompts come after the change: a prompt that a rank holds may go back to it, whatever its class."""
    client.flush()
    fresh, before = SHORTS[:4], SHORTS[4:]
    long = client.submit(LONGS[0], FEW)
    client.wait_for_chunk_or([long])
    shorts = [client.submit(prompt, FEW) for prompt in before]
    client.set_role("mixed", LONG_RANK)
    client.set_role("long", SHORT_RANK)
    assert [one["role"] for one in client.ranks()] == ["long", "mixed"]
    more = [client.submit(prompt, FEW) for prompt in (*LONGS[1:3], *fresh)]
    check([long, *shorts], [LONGS[0], *before], reference)
    ranks = check(more, [*LONGS[1:3], *fresh], reference)
    assert set(ranks[2:]) == {LONG_RANK}, "only the mixed rank takes shorts now"
    until(lambda: all(one["draining"] == 0 for one in client.ranks()), what="the former work is done")
    client.set_role("short", SHORT_RANK)
    client.set_role("long", LONG_RANK)
    assert [one["role"] for one in client.ranks()] == ["short", "long"]
    assert client.full_state()["pools"]["moves"] == {"operator": 4}
    assert rank_of(client.ask(before[0], 1)) == SHORT_RANK
    text = client.metrics()
    assert 'pla_pool_ranks{cls="short"' in text
    assert 'reason="operator"' in text


def test_aborts_in_both_pools(client: Spatial, reference: Reference) -> None:
    """Said once each. SGLang's front drops an abort of a request that has not reached it; behind it all stays in order:
    what the controller has dispatched, it has dispatched before the abort that comes after."""
    client.flush()
    before = client.dispatched()
    longs = [client.submit(prompt_of(6000), 2000, rid=f"long-{index}") for index in range(2)]
    shorts = [client.submit(prompt_of(20), 4000, rid=f"short-{index}") for index in range(2)]
    beside = [client.submit(prompt, FEW) for prompt in SHORTS[4:8]]
    sent = len(longs) + len(shorts) + len(beside)
    until(lambda: client.dispatched() >= before + sent, what="every request has been dispatched")
    for name in ("long-0", "long-1", "short-0", "short-1"):
        client.abort(name)
    assert all(aborted(one) for one in (*longs, *shorts))
    assert set(check(beside, SHORTS[4:8], reference)) == {SHORT_RANK}
    client.flush()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"role": "fast"}, "allowed: mixed, short, long"),
        ({"role": "short", "dp_rank": 2}, "allowed: 0 to 1"),
        ({"role": "short", "speed": 1}, "expected"),
        ([], "expected"),
    ],
    ids=str,
)
def test_a_bad_role_is_refused(client: Spatial, body: Any, named: str) -> None:
    before = client.ranks()
    status, answer = client.status("/pla/role", body, headers=client.headers)
    assert status == 400
    assert named in answer["error"]["message"]
    assert client.ranks() == before


def test_the_admin_key_is_needed(client: Spatial) -> None:
    for path, body in (("/pla/role", {"role": "short"}), ("/pla/config", {"pressure": "off"})):
        assert client.status(path, body)[0] == 401
    assert client.status("/pla/role", {"role": "short"}, headers={"Authorization": "Bearer wrong"})[0] == 401
    assert client.configure(pressure="off")["pressure"] == "off"
    assert client.full_state()["pools"]["knobs"]["pressure"] == "off"
    client.configure(pressure="auto")
