"""``--place-decode prefilled`` in the control plane: who is asked when, what moves or stays, and what is seen of it."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet.router.control.test_router_migration import drop, find_moves, join
from support.router_scene import Scene, count_moves, run, scene

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.migration import PULLING
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.parity import replay_file
from pla_sglang.policy.interface.decisions import Placement
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import Placed

LATE: dict[str, Any] = {"policy": "static-pd", "migration": "on", "hops": True, "place_decode": "prefilled"}
TWO, FOUR = ["stateless"] * 2, ["stateless"] * 4


def by_role(one: Scene, role: Role) -> Worker:
    return next(worker for worker in one.plane.table if worker.view.role is role)


def first_token(one: Scene, rid: str, *, movable: bool = True) -> None:
    one.reach(rid, m.Milestone.SENT)
    one.reach(rid, m.Milestone.FIRST_TOKEN, movable=movable)


def done(one: Scene, worker: Worker) -> list[str]:
    return [command["do"] for command in one.instances[worker.number].commands]


def explain(one: Scene, rid: str = "r") -> dict[str, Any]:
    told: dict[str, Any] = one.admin("GET", f"/pla/explain/{rid}")[1]
    return told


def placed(one: Scene) -> dict[str, int]:
    counts: dict[str, int] = one.admin("GET", "/pla/state")[1]["place_decode"]["placed"]
    return counts


async def test_a_request_is_placed_and_moved_when_its_prefill_is_done() -> None:
    async with scene(TWO, **LATE) as one:
        await one.connected()
        prefill, decode = by_role(one, Role.PREFILL), by_role(one, Role.DECODE)
        assign = one.assign("r")
        assert (assign.prefill, assign.decode) == (None, prefill.number), "whole, at the instance of its prefill"
        assert (explain(one)["placement"], explain(one)["placed_on"]) == ("any.when_prefilled", None)
        first_token(one, "r")
        await one.until(lambda: find_moves(one))
        [order] = find_moves(one)
        assert (order.prefill, order.decode, order.held_tokens) == (prefill.number, decode.number, 3)
        assert order.reason == "baseline.minimal_load"
        join(one)
        await one.until(lambda: done(one, prefill) == ["hold", "commit"])
        told = explain(one)
        assert (told["placement"], told["placed_on"]) == ("baseline.minimal_load", decode.view.name)
        assert told["placed_s"] >= told["first_s"] > 0
        attempt = told["attempts"][1]
        assert (attempt["cause"], attempt["decode"]) == ("baseline.minimal_load", decode.view.name)
        assert placed(one) == {"baseline.minimal_load": 1}
        metrics = one.admin("GET", "/metrics")[1]
        for reason in ("any.when_prefilled", "baseline.minimal_load"):
            assert f'pla_router_placements_total{{reason="{reason}"}} 1.0' in metrics
        assert 'pla_router_migrations_total{how="pull",reason="baseline.minimal_load"} 1.0' in metrics
        one.ended("r")
        await one.at_rest()


async def test_the_fleet_of_that_time_decides() -> None:
    """An instance that was to decode prefills by then, and the other way round: the request stays."""
    async with scene(TWO, **(LATE | {"policy": "arrow"})) as one:
        await one.connected()
        prefill, decode = by_role(one, Role.PREFILL), by_role(one, Role.DECODE)
        one.ask("r")
        assert one.admin("POST", f"/workers/{prefill.number}/role", {"role": "mixed"})[0] == 200
        assert one.admin("POST", f"/workers/{decode.number}/role", {"role": "mixed"})[0] == 200
        first_token(one, "r")
        assert placed(one) == {"arrow.decode_in_place": 1}
        assert (explain(one)["placement"], explain(one)["placed_on"]) == ("arrow.decode_in_place", None)
        assert (find_moves(one), done(one, prefill)) == ([], [])
        one.ended("r")
        await one.at_rest()


async def test_what_cannot_move_stays_and_the_policy_is_not_asked() -> None:
    async with scene(TWO, **LATE) as one:
        await one.connected()
        one.ask("no stream of it is marked")
        first_token(one, "no stream of it is marked", movable=False)
        one.ask("one token", output_tokens=1)
        first_token(one, "one token")
        assert placed(one) == {"any.not_movable": 1, "any.keep_local": 1}
        assert one.plane.policy.runner is not None
        assert not one.plane.policy.runner.placements
        for rid in ("no stream of it is marked", "one token"):
            one.ended(rid)
        await one.at_rest()
        assert not any(one.instances[worker.number].commands for worker in one.plane.table)


@pytest.mark.parametrize(("stream", "prompts"), [(False, 1), (True, 2)])
async def test_what_is_known_not_to_move_is_placed_at_dispatch(stream: bool, prompts: int) -> None:
    async with scene(TWO, **LATE) as one:
        await one.connected()
        ask = m.Ask("r", 0, m.Endpoint.GENERATE, stream, time.monotonic(), 10, input_tokens=50, prompts=prompts)
        one.plane.on_message(ask)
        assign = one.relay.last(m.Assign)
        assert (assign.prefill, assign.decode) == (
            by_role(one, Role.PREFILL).number,
            by_role(one, Role.DECODE).number,
        )
        one.reach("r", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        assert placed(one) == {}
        one.ended("r")
        await one.at_rest()


async def test_several_answers_are_served_whole_and_stay() -> None:
    async with scene(TWO, **LATE) as one:
        await one.connected()
        assign = one.assign("r", samples=2)
        assert assign.prefill is None
        first_token(one, "r", movable=False)
        assert (placed(one), explain(one)["placement"]) == ({}, "any.keep_local")
        one.ended("r")
        await one.at_rest()


async def test_a_move_that_is_refused_leaves_the_request_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Refused at once, by the policy's mistake, and by the instance that is to hold it."""
    async with scene(TWO, **LATE) as one:
        await one.connected()
        prefill, decode = by_role(one, Role.PREFILL), by_role(one, Role.DECODE)
        for rid in ("refused", "mistake", "late"):
            one.ask(rid)
        peering = one.plane._peering
        runner = one.plane.policy.runner
        assert runner is not None
        peering.is_connected = lambda source, target: False  # type: ignore[method-assign]
        first_token(one, "refused")
        del peering.is_connected  # type: ignore[method-assign]
        asked, runner.policy.dispatcher.place_decode = runner.policy.dispatcher.place_decode, None  # type: ignore
        first_token(one, "mistake")
        runner.policy.dispatcher.place_decode = asked  # type: ignore[method-assign]
        assert "the decode of request mistake cannot be placed" in caplog.text
        one.instances[prefill.number].hop_answers["hold"] = {"status": "refused", "reason": "memory"}
        first_token(one, "late")
        await one.until(lambda: count_moves(one.plane) == 0)
        assert placed(one) == {"any.not_movable": 1, "any.no_instance": 1, "baseline.minimal_load": 1}
        told = explain(one, "late")
        assert told["placed_on"] == decode.view.name
        assert [attempt["state"] for attempt in told["attempts"]] == ["streaming", "over"], "the move came to nothing"
        assert told["attempts"][1]["detail"] == "refused: memory"
        assert 'pla_router_migration_failures_total{reason="refused"} 1.0' in one.admin("GET", "/metrics")[1]
        assert find_moves(one) == []
        for rid in ("refused", "mistake", "late"):
            one.ended(rid)
        await one.at_rest()


async def test_an_instance_that_is_full_may_keep_what_it_has() -> None:
    """Others are not sent there, but what it serves decodes there if the policy says so."""
    async with scene(TWO, **(LATE | {"policy": "arrow"})) as one:
        await one.connected()
        one.ask("r")
        at = by_role(one, Role.PREFILL)
        assert one.admin("POST", f"/workers/{at.number}/role", {"role": "mixed"})[0] == 200
        one.plane.dispatcher.exclusions.note_full(at, time.monotonic() + 100)
        first_token(one, "r")
        assert placed(one) == {"arrow.decode_in_place": 1}
        one.ended("r")
        await one.at_rest()


@pytest.mark.parametrize("modes", [["stateless", "stateless", "null"], ["stateless", "stateless", "decode"]])
def test_beside_other_kinds_decodes_are_placed_at_dispatch(modes: list[str], caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with scene(modes, **LATE) as one:
            other = one.plane.table.by_number[2]
            assert one.admin("GET", "/pla/state")[1]["place_decode"]["blocked_by"] == other.view.name
            assert f"requests of {other.view.name} cannot move" in caplog.text
            assert one.plane.policy.runner is not None
            assert not one.plane.policy.runner.places_late
            assert one.admin("DELETE", "/workers/2")[0] == 202
            await one.until(lambda: one.plane.policy.runner.places_late)  # type: ignore[union-attr]
            assert one.admin("GET", "/pla/state")[1]["place_decode"]["blocked_by"] is None

    with caplog.at_level(logging.WARNING):
        run(work)


async def test_without_the_flag_decodes_are_placed_at_dispatch() -> None:
    async with scene(TWO, **(LATE | {"place_decode": "dispatch"})) as one:
        await one.connected()
        assign = one.assign("r")
        assert (assign.prefill, assign.decode) == (
            by_role(one, Role.PREFILL).number,
            by_role(one, Role.DECODE).number,
        )
        state = one.admin("GET", "/pla/state")[1]["place_decode"]
        assert state == {"when": "dispatch", "blocked_by": None, "placed": {}}
        one.ended("r")
        await one.at_rest()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"place_decode": "prefilled"},
            "--place-decode prefilled needs --migration on, before stateless instances; allowed without it: dispatch",
        ),
        ({"place_decode": "later", "migration": "on"}, "--place-decode 'later' .*; allowed: dispatch, prefilled"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ControlKnobs(**fields)


class Crowd:
    """Requests at random: some cannot move, moves fail in every way, some end before their first token."""

    def __init__(self, one: Scene, rng: Random) -> None:
        self.one, self.rng = one, rng
        self.late: list[str] = []  # without a first token
        self.open: list[str] = []  # with one

    def step(self, number: int) -> None:
        rng, rid = self.rng, f"r{number}"
        assign = self.one.ask(rid, input_tokens=rng.randrange(10, 4000), output_tokens=rng.choice((None, None, 1, 200)))
        assert isinstance(assign, m.Assign)
        assert assign.prefill is None
        self.late.append(rid)
        for view in self.one.plane.table.fleet.instances:
            view.token_interval_s, view.context_tokens = rng.choice((None, 0.02, 0.4)), rng.randrange(200_000)
        if rng.random() < 0.8:
            rid = self.late.pop(rng.randrange(len(self.late)))
            first_token(self.one, rid, movable=rng.random() < 0.8)
            self.open.append(rid)
        elif rng.random() < 0.3:
            self.one.ended(self.late.pop(), m.Outcome.CLIENT_GONE)
        for order in find_moves(self.one):
            self._come_of(order)
        if len(self.open) > 6:
            self.one.ended(self.open.pop(0))

    def _come_of(self, order: m.Assign) -> None:
        self.one.relay.told.remove(order)
        if self.rng.random() < 0.7:
            join(self.one, order.attempt, order.rid)
        else:
            cause = self.rng.choice((m.Cause.REFUSED, m.Cause.FULL, m.Cause.RESUMED))
            drop(self.one, order.attempt, cause, order.rid)


def count_unplaced(one: Scene) -> int:
    """Requests that have ended before they were placed."""
    return sum(explain(one, f"r{number}")["placement"] == "any.when_prefilled" for number in range(80))


@pytest.mark.parametrize("policy", ["static-pd", "arrow", "combined-roles"])
async def test_each_request_is_placed_once_and_a_replay_places_the_same(policy: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "run.jsonl", Random(3)
    async with scene(FOUR, **(LATE | {"policy": policy, "record": path})) as one:
        await one.connected()
        crowd = Crowd(one, rng)
        for number in range(80):
            for instance in one.instances:
                instance.hop_answers["hold"] = rng.choice(
                    ({"status": "held", "tokens": 3, "kv_tokens": 52}, {"status": "finished"}, None)
                )
            crowd.step(number)
            if number % 8 == 0:
                moves = one.plane.migration._moves
                await one.until(lambda: all(move.state is PULLING for move in moves.values()))  # noqa: B023
        counts = Counter(placed(one))
        for rid in [*crowd.late, *crowd.open]:
            one.ended(rid)
        await one.at_rest()
        assert {"any.not_movable", "any.keep_local"} < set(counts)
        late = re.search(r'placements_total{reason="any.when_prefilled"} (.*)', one.admin("GET", "/metrics")[1])
        assert late is not None
        assert counts.total() == int(float(late[1])) - count_unplaced(one)
        assert counts.total() > 20
    rows = [line for line in read(path) if isinstance(line, Placed)]
    assert len(rows) >= 10
    assert all(row.prefilled_on is not None for row in rows)
    _, result = replay_file(path)
    assert result.decisions["placed"] == len(rows)
    assert result.decisions["dispatched"] == 80
    assert result.identical_share == 1.0, result.differences


async def test_a_replay_that_places_otherwise_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with scene(FOUR, **(LATE | {"record": path})) as one:
        await one.connected()
        assert one.plane.policy.runner is not None
        decode = by_role(one, Role.DECODE).view
        dispatcher = one.plane.policy.runner.policy.dispatcher
        wrong = Placement(decode, FleetReason.ROUND_ROBIN)
        dispatcher.place_decode = lambda request, view, now_s: wrong  # type: ignore[method-assign]
        one.ask("r")
        first_token(one, "r")
        one.ended("r")
        await one.at_rest()
    _, result = replay_file(path)
    assert (result.decisions["placed"], result.identical["placed"]) == (1, 0)
