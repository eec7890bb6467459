"""``bench hops``: what it reads off a stream, its judge, and a whole part before stand-ins that hold and hand over."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
from aiohttp import web

from bench.check.faults.answers import Shown, count_wrong_bytes, read_shown
from bench.check.faults.bodies import CHAT, GENERATE, Body, make_ids
from bench.check.hops import bench, pauses, storm
from bench.check.hops.instances import describe_gauges, describe_state
from bench.check.hops.judge import judge_rides, make_references
from bench.check.hops.plans import ENDS, Event, Life, plan_lives
from bench.check.hops.rider import MarkedAnswer
from bench.check.hops.settings import SETTINGS
from pla_sglang.sim import chain

AT_REST = {
    "held": {"held": 0, "kv_tokens": 0, "totals": {}},
    "sending": {"legs": {"sent": 0}, "kv_tokens": 0},
    "receiving": {"legs": {}, "kv_tokens": 0},
    "quarantine": {"requests": 0},
    "faults": 0,
    "incarnation": "0123",
}
STEP_S = 0.002


class StandIns:
    """Two instances in one process: the chain model's answers a token at a time, holds, pulls, redos, aborts.

    Attributes:
        doubles: a stream that goes on says its last known token again.
        forgets: an end of a hold is not counted.
        presses: what is held goes on at once, as where memory is short.
        lets_go: as ``presses``, and it is not counted.
    """

    def __init__(self) -> None:
        self.doubles = self.forgets = self.presses = self.lets_go = False
        self.held: dict[int, str] = {}  # room -> id
        self.shown: dict[str, int] = {}  # tokens of each running stream
        self.orders: dict[str, str] = {}  # what became of a stream: "moved", "abort"
        ways = ("held", "committed", "aborted", "resumed_by_command", "resumed_by_pressure")
        self.totals: dict[str, int] = dict.fromkeys(ways, 0)
        self.runners: list[web.AppRunner] = []

    async def start(self) -> dict[str, Any]:
        described = []
        for number in range(2):
            app = web.Application()
            app.router.add_post("/generate", self._generate)
            app.router.add_post("/pla/hops", self._order)
            app.router.add_post("/pla/peers", self._tell)
            app.router.add_get("/pla/peers", self._tell)
            app.router.add_post("/abort_request", self._abort)
            app.router.add_post("/flush_cache", self._tell)
            app.router.add_get("/pla/state", self._state)
            app.router.add_get("/metrics", self._metrics)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.runners.append(runner)
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            described.append({"name": f"stateless-{number}", "kind": "stateless", "url": url, "bootstrap_port": 1})
        return {"instances": described}

    async def stop(self) -> None:
        for runner in self.runners:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            return await self._stream(request, body)
        except asyncio.CancelledError:  # its client went away
            self._drop_held(body["rid"])
            raise

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        rid, sampling = body.get("rid", ""), body["sampling_params"]
        tags = sampling.get("custom_params") or {}
        if "rid" not in body:
            return web.json_response({})
        answer = chain.expected(body["input_ids"], sampling["max_new_tokens"], repeats=True).tokens
        known = len(tags.get("pla_tokens", ()))
        assert list(answer[:known]) == tags.get("pla_tokens", [])
        if "bootstrap_room" in body and body["bootstrap_room"] not in self.held:
            return web.json_response({"error": "its room is not held"}, status=410)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": pla-prompt 5:ab\n")
        name = tags.get("pla_answer_id", rid)
        start = known - 1 if self.doubles and known else known
        for count in range(start + 1, len(answer) + 1):
            while rid in self.held.values():
                await asyncio.sleep(STEP_S)
            if self.orders.get(rid) == "moved":
                return response
            if self.orders.get(rid) == "abort":
                await response.write(event_of(name, answer[: count - 1], "abort"))
                return response
            finish = ("stop" if answer[-1] == chain.EOS else "length") if count == len(answer) else None
            marks = f": pla {answer[count - 1]} c{count}\n".encode()
            await response.write(marks + event_of(name, answer[:count], finish))
            self.shown[rid] = count
            await asyncio.sleep(STEP_S)
        del self.shown[rid]
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _order(self, request: web.Request) -> web.Response:
        [command] = (await request.json())["commands"]
        return web.json_response({"answers": [self._carry_out(command)]})

    def _carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        room, do = command["room"], command["do"]
        if do == "hold":
            if command["rid"] not in self.shown:
                return {"status": "unknown"}
            self.held[room] = command["rid"]
            self.totals["held"] += 1
            if self.presses or self.lets_go:
                asyncio.get_running_loop().call_soon(self._press, room)
            elif command["for_s"] < 1:
                asyncio.get_running_loop().call_later(0.01, self._carry_out, {"do": "resume", "room": room})
            return {"status": "held", "tokens": self.shown[command["rid"]], "kv_tokens": 9}
        rid = self.held.pop(room, None)
        if rid is None:
            return {"status": "unknown", "code": 410}
        said, total = {
            "resume": ("resumed", "resumed_by_command"),
            "commit": ("committed", "committed"),
        }[do]
        self.totals[total] += not self.forgets
        if do == "commit":
            self.orders[rid] = "moved"
        return {"status": said}

    def _press(self, room: int) -> None:
        del self.held[room]
        self.totals["held" if self.lets_go else "resumed_by_pressure"] += -1 if self.lets_go else 1

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.orders[rid] = "abort"
        self._drop_held(rid)
        return web.json_response({})

    def _drop_held(self, rid: str) -> None:
        for room in [room for room, other in self.held.items() if other == rid]:
            del self.held[room]
            self.totals["aborted"] += 1

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response({"peers": {"other": "ready"}})

    async def _state(self, request: web.Request) -> web.Response:
        held = {"held": len(self.held), "kv_tokens": 0, "totals": self.totals}
        return web.json_response({"schedulers": [{"stateless": AT_REST | {"held": held}}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="pla_transfer_reqs 0\n")


def event_of(name: str, ids: tuple[int, ...], finish: str | None) -> bytes:
    meta = {"id": name, "prompt_tokens": 5, "completion_tokens": len(ids), "finish_reason": finish and {"type": finish}}
    said = {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}
    return b"data: " + msgspec.json.encode(said) + b"\n\n"


def ids_body(asked: int) -> Body:
    prompt = chain.prompt_of(20, asked, random.Random(asked))
    return make_ids(prompt, asked, kind="words", spare=4, repeats=True)


def run_lives(stand_ins: StandIns, lives: list[Life], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(storm.Part, "plan", lambda part: lives)
    monkeypatch.setattr("bench.check.hops.instances.REST_S", 1.0)

    async def run() -> dict[str, Any]:
        described = await stand_ins.start()
        try:
            return await storm.run_part(
                storm.Part(SETTINGS["small"], "chain", 0, len(lives), 1), described, lambda: None
            )
        finally:
            await stand_ins.stop()

    return asyncio.run(run())


EVERYTHING = [
    Life(index, ids_body(40 + index), ((5, event), (20, Event.MOVE)) if event not in ENDS else ((5, event),), index % 2)
    for index, event in enumerate(Event)
]


def test_all_that_may_befall_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run_lives(StandIns(), EVERYTHING, monkeypatch)
    assert (row["errors"], row["reference_errors"], row["leftovers"]) == ([], [], [])
    assert (row["requests"], row["whole"], row["aborted"], row["left"]) == (len(Event), 5, 2, 2)
    assert (row["tokens_wrong"], row["bytes_wrong"], row["failed"]) == (0, 0, 0)
    assert (row["redos"], row["resumes"], len(row["pauses_s"])) == (1, 3, row["hops"])
    assert row["hops"] == 6
    assert {event.value for event in Event} - set(row["events"]) == {"lose"}, "which is counted as a redo"


def test_a_token_that_comes_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    stand_ins.doubles = True
    row = run_lives(stand_ins, EVERYTHING[:2], monkeypatch)
    assert row["tokens_wrong"] > 0
    assert row["wrong_by_kind"] == {"words": 2}
    assert "move" in row["errors"][0]


def test_a_hold_that_does_not_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    stand_ins.forgets = True
    row = run_lives(stand_ins, EVERYTHING[:1], monkeypatch)
    assert any("held 2, ended 0" in text for text in row["leftovers"]), row["leftovers"]


def test_a_hold_that_is_over_by_itself_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    stand_ins.presses = True
    row = run_lives(stand_ins, EVERYTHING, monkeypatch)
    assert (row["errors"], row["leftovers"], row["tokens_wrong"], row["bytes_wrong"]) == ([], [], 0, 0)
    assert row["hops"] == 0, "nobody pulls what is not held"
    assert row["events"]["pull_overtaken"] > 1
    assert row["events"]["hold_over"] >= row["events"]["pull_overtaken"] + 2


def test_a_hold_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    stand_ins.lets_go = True
    row = run_lives(stand_ins, EVERYTHING[:4], monkeypatch)
    assert any("holds were over, 0 went on by themselves" in text for text in row["leftovers"]), row["leftovers"]


def test_a_marked_stream_cut_anywhere_gives_the_same() -> None:
    marked = b": pla-prompt 5:ab\n: pla 7 c1\ndata: {}\n\n: pla 8,9 c1\n\n: pla - c3.F\ndata: 1\n\ndata: 2\n\n"
    marked += b"data: [DONE]\n\n"
    for cut in range(len(marked)):
        answer = MarkedAnswer()
        answer.feed(marked[:cut], 1.0)
        answer.feed(marked[cut:], 2.0)
        assert answer.events == [b"data: {}", b"data: 1", b"data: 2", b"data: [DONE]"]
        assert (answer.ids, answer.seen, answer.prompt) == ([7, 8, 9], "c3.F", "5:ab")


def test_what_comes_behind_the_last_comment_is_said_again() -> None:
    answer = MarkedAnswer()
    answer.feed(b": pla 7 c1.F\ndata: 1\n\ndata: usage\n\nda", 1.0)
    answer.begin_hop()
    answer.feed(b"data: usage\n\ndata: [DONE]\n\n", 2.0)
    assert answer.events == [b"data: 1", b"data: usage", b"data: [DONE]"]
    assert answer.tags("a")["pla_tokens"] == [7]


def chat(**delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": delta.pop("finish", None)}
    return b"data: " + json.dumps({"id": "a", "choices": [choice]}).encode()


def test_a_chat_is_read_field_by_field() -> None:
    call = {"index": 0, "function": {"name": "find", "arguments": "{"}}
    more = {"index": 0, "function": {"name": None, "arguments": "}"}}
    events = [
        chat(role="assistant", content=""),
        chat(reasoning_content="hm"),
        chat(content="Grüße"),
        chat(tool_calls=[call]),
        chat(tool_calls=[more]),
        chat(finish="tool_calls"),
        b'data: {"id": "a", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}}',
        b"data: [DONE]",
    ]
    shown = read_shown(CHAT, events)
    assert shown == Shown("Grüße", "hm", (("find", "{}"),), "tool_calls", None, 1, (4, 6), (), 1, 1)
    assert count_wrong_bytes(shown, read_shown(CHAT, events)) == 0
    assert count_wrong_bytes(shown, read_shown(CHAT, [events[0], *events])) == 1, "a second role"
    assert count_wrong_bytes(shown, read_shown(CHAT, [*events[:3], chat(content="e"), *events[3:]])) == 1
    assert count_wrong_bytes(shown, read_shown(CHAT, events[:-1])) == 1, "no end"


@pytest.mark.parametrize("model", ["chain", "demo"])
def test_lives_are_the_same_for_the_same_seed(model: str) -> None:
    lives = plan_lives(80, model, instances=2, seed="s")
    assert lives == plan_lives(80, model, instances=2, seed="s")
    assert lives != plan_lives(80, model, instances=2, seed="t")
    assert {len(life.events) for life in lives} == {0, 1, 2, 3, 4}
    assert {life.body.path for life in lives} == {GENERATE, "/v1/completions", CHAT}
    for life in lives:
        assert [cut for cut, _ in life.events] == sorted({cut for cut, _ in life.events})
        assert not any(event in ENDS for _, event in life.events[:-1])


def test_a_reference_that_is_not_the_oracles() -> None:
    ride = storm.Ride(Life(0, ids_body(9), (), 0), ended="whole")
    ride.answer.feed(b": pla 7 c1\n" + event_of("a", (7,), "stop") + b"data: [DONE]\n\n", 1.0)
    references, [error] = make_references([ride])
    assert "not the oracle's" in error
    assert judge_rides([ride], references)["tokens_wrong"] == 0


def test_what_is_left_behind_is_named() -> None:
    assert describe_state(AT_REST) == []
    left = AT_REST | {"quarantine": {"requests": 2}, "faults": 1, "sending": {"legs": {"sent": 1}, "kv_tokens": 3}}
    assert describe_state(left) == ["sending: 4", "quarantine: 2", "faults: 1"]
    resumed = {"held": {"held": 0, "kv_tokens": 0, "totals": {"held": 2, "resumed_by_time": 1, "timed_out": 1}}}
    assert describe_state(AT_REST | resumed) == []
    page = 'pla_transfer_reqs{end="a"} 0\npla_transfer_kv_tokens{holder="b"} 3\npla_peers{state="ready"} 1\n'
    assert describe_gauges(page) == ['pla_transfer_kv_tokens{holder="b"}: 3']


def test_tokens_beside_a_move() -> None:
    mover, other = (storm.Ride(Life(0, ids_body(5), (), 0)) for _ in range(2))
    mover.answer.came_s, mover.moves_s = [0.0, 0.1, 0.22, 0.88, 1.0], [(0.22, 0.88)]
    assert mover.pauses_s == pytest.approx([0.66])
    other.answer.came_s = [-0.5, 0.0, 0.1, 0.3, 0.6, 0.6, 1.0, 1.5]
    during_s, apart_s = pauses.measure_tpot(mover, [other])
    # from 0.2 to 0.9: half of a gap of 0.2 s, one of 0.3, one of nothing, three quarters of one of 0.4
    assert during_s == pytest.approx((0.1 + 0.3 + 0.3) / (0.5 + 1 + 1 + 0.75))
    assert apart_s == pytest.approx((0.1 + 0.1 + 0.1) / (1 + 0.5 + 0.25))


def test_bystanders_of_a_stutter_are_not_slower_in_moves() -> None:
    """Gaps of 5 and 35 ms in turn, and moves that begin anywhere: long gaps are not counted more often."""
    rng = random.Random(3)
    mover, other = (storm.Ride(Life(0, ids_body(5), (), 0)) for _ in range(2))
    mover.answer.came_s = [0.0, 100.0]
    mover.moves_s = [(start_s, start_s + 0.2) for start_s in (rng.uniform(place, place + 0.5) for place in range(99))]
    other.answer.came_s = [pair * 0.04 + part for pair in range(2500) for part in (0.0, 0.005)]
    during_s, apart_s = pauses.measure_tpot(mover, [other])
    assert during_s is not None
    assert during_s / (apart_s or 1) == pytest.approx(1, abs=0.04)


ROW = {
    **dict.fromkeys(("requests", "whole", "aborted", "left", "failed", "tokens", "hops", "redos", "resumes"), 1),
    **dict.fromkeys(("tokens_wrong", "bytes_wrong", "references_wrong", "failed"), 0),
    "events": {"move": 2},
    "errors": [],
    "leftovers": [],
    "errors_logged": [],
    "plugin_commit": "abc",
}
PAUSE = {"context_tokens": 512, "pauses_s": [0.1, 0.2, 0.3], "bound_s": 0.2, "bystander_tpot_ratio": 1.01}
PAUSE |= {"tokens_wrong": 0, "failed": 0, "errors": [], "leftovers": [], "plugin_commit": "abc"}


def test_rows_are_summed_up() -> None:
    keys = [{"setting": "small", "model": "chain"}, {"setting": "router", "model": "chain"}, {"setting": "pauses"}]
    result = bench.sum_up(list(zip(keys, [ROW, ROW | {"ledger_balanced": True}, PAUSE], strict=True)))
    assert (result["requests"], result["leaks"], result["ledger_balanced"]) == (2, 0, True)
    assert (result["pause_p50_s"], result["bystander_tpot_ratio"]) == (0.2, 1.01)
    assert result["pause_by_context"]["512"]["moves"] == 3
    assert bench.is_good(result)
    for worse in ({"leaks": 1}, {"bytes_wrong": 1}, {"failed": 1}, {"ledger_balanced": False}):
        assert not bench.is_good(result | worse)
    assert "| 2 | " in bench.page(result | {"environment": {"hardware": "cpu"}, "seed": 0})
