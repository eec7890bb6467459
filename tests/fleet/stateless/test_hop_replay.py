"""A request that brings a part of its answer: what it is let in with, what ends at once, and what is refused."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.fleet.stateless.engine import StatelessEngine
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.requests.arrival import reason_against_moving, replay_answer
from pla_sglang.fleet.stateless.transfer.peers import PeerBook
from pla_sglang.plugin.engine.faults import Faults

THINK_END = [40, 41]


class FakeGrammar:
    """Accepts even tokens."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_token(self, token: int) -> None:
        if token % 2:
            raise ValueError(f"{token} is odd")
        self.accepted.append(token)

    def is_terminated(self) -> bool:
        return False


def host_request(**fields: Any) -> Any:
    """SGLang's own request, so that its finish state and its counters are real."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = {"max_new_tokens": 8, "custom_params": fields.pop("tags", None)} | fields.pop("sampling", {})
    sampling = SamplingParams(**params)
    sampling.normalize(tokenizer=None)
    return Req(fields.pop("rid", "r"), "", array("q", [1, 2, 3]), sampling, eos_token_ids={9}, vocab_size=100, **fields)


class Bench:
    """An engine that knows nothing but requests, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = object.__new__(StatelessEngine)
        self.engine.refused = self.engine.redone = 0
        self.engine.faults = Faults()
        self.engine.book = PeerBook("127.0.0.1", 9000)
        self.streamed: list[Any] = []
        streamer = SimpleNamespace(stream_output=lambda reqs, logprob: self.streamed.extend(reqs))
        self.engine._scheduler = SimpleNamespace(
            output_streamer=streamer, model_config=SimpleNamespace(think_end_ids=THINK_END)
        )
        self.refusals: list[tuple[int, str]] = []
        monkeypatch.setattr(calls, "end_with_error", self._refuse)

    def _refuse(self, scheduler: Any, req: Any, reason: str, status: int) -> None:
        req.finished_reason = reason
        self.refusals.append((int(status), reason))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_request_with_an_answer_so_far_goes_to_the_hosts_queue_with_it(bench: Bench) -> None:
    req = host_request(tags={"pla_tokens": [4, 6, 8]})
    req.grammar, req.require_reasoning = FakeGrammar(), True
    assert not bench.engine.takes(req)
    assert list(req.output_ids) == req.grammar.accepted == [4, 6, 8]
    assert (req.reasoning_tokens, req._is_reasoning_over) == (3, False)
    assert (bench.engine.redone, bench.streamed, bench.refusals) == (1, [], [])
    assert not bench.engine.takes(req), "when it comes back retracted it is not read again"
    assert list(req.output_ids) == [4, 6, 8]


@pytest.mark.parametrize("tags", [None, {"pla_movable": 1}, {"pla_tokens": []}])
def test_a_request_without_one_is_as_before(bench: Bench, tags: Any) -> None:
    req = host_request(tags=tags)
    assert not bench.engine.takes(req)
    assert (list(req.output_ids), bench.engine.redone) == ([], 0)


@pytest.mark.parametrize("answer", [[4, 40, 41, 5], [4, 40, 7, 40, 41]])
def test_reasoning_is_counted_as_token_by_token(answer: list[int]) -> None:
    at_once, in_steps = host_request(require_reasoning=True), host_request(require_reasoning=True)
    replay_answer(at_once, answer, THINK_END)
    for token in answer:
        in_steps.update_reasoning_tokens(token, THINK_END)
    assert at_once._is_reasoning_over is in_steps._is_reasoning_over is True
    assert at_once.reasoning_tokens == in_steps.reasoning_tokens


@pytest.mark.parametrize(("answer", "reason"), [([4, 9], "stop"), ([5] * 8, "length")])
def test_an_answer_that_was_complete_ends_at_once(bench: Bench, answer: list[int], reason: str) -> None:
    """Its instance died after the last token and before the end of the stream."""
    req = host_request(tags={"pla_tokens": answer})
    assert bench.engine.takes(req)
    assert bench.streamed == [req]
    assert req.finished_reason.to_json()["type"] == reason
    assert list(req.output_ids_through_stop) == answer
    assert req.time_stats.convert_to_output_meta_info()["queue_time"] == 0


@pytest.mark.parametrize(
    ("tags", "status", "reason"),
    [
        ({"pla_tokens": [100]}, 400, "0 to 99"),
        ({"pla_tokens": [-1, 4]}, 400, "0 to 99"),
        ({"pla_tokens": [1.0]}, 400, "pla_tokens"),
        ({"pla_tokens": [True]}, 400, "pla_tokens"),
        ({"pla_tokens": "12"}, 400, "pla_tokens"),
        ({"pla_tokens": [5] * 9}, 409, "9 tokens; at most 8"),
    ],
)
def test_what_is_refused(bench: Bench, tags: dict[str, Any], status: int, reason: str) -> None:
    req = host_request(tags=tags)
    assert bench.engine.takes(req)
    [(code, text)] = bench.refusals
    assert (code, reason in text, bench.engine.refused) == (status, True, 1)


def test_an_answer_that_its_grammar_does_not_have(bench: Bench) -> None:
    req = host_request(tags={"pla_tokens": [4, 7]})
    req.grammar = FakeGrammar()
    assert bench.engine.takes(req)
    assert bench.refusals == [(409, "token 1 of the answer so far is not in the grammar: 7 is odd")]
    assert list(req.output_ids) == []


def test_a_request_that_the_host_has_found_wrong_is_left_to_it(bench: Bench) -> None:
    """As one whose grammar does not compile: the host replaces its prompt and ends it with its prefill."""
    req = host_request(tags={"pla_tokens": [4, 6]})
    req.to_finish = object()
    assert not bench.engine.takes(req)
    assert list(req.output_ids) == []


@pytest.mark.parametrize(
    "fields",
    [{"return_logprob": True}, {"session_id": "s"}, {"custom_logit_processor": "x"}, {"return_hidden_states": True}],
)
def test_what_cannot_move(bench: Bench, fields: dict[str, Any]) -> None:
    req = host_request(tags={"pla_tokens": [4, 6]}, **fields)
    assert reason_against_moving(req)
    assert bench.engine.takes(req)
    assert bench.refusals[0][0] == 409
    assert reason_against_moving(host_request()) is None
