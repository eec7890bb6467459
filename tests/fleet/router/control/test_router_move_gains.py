"""What operators see of moves and of predicted lengths: what they were expected to bring, and what came of it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from fleet.router.control.test_router_migration import ON, TWO, join, move_of, start
from fleet.router.control.test_router_moves import SURVIVAL, Place, fill, hear, limit_answer
from support.records import make_record
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.observability.move_gains import measure_moves
from pla_sglang.fleet.router.control.requests.request_record import End, MoveKind, RequestRecord
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load.report import RequestRow
from pla_sglang.policy.common.survival import SurvivalPredictor
from pla_sglang.policy.interface.decisions import Migrate
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.interface.remaining_length import EndedAnswer, Floats, RunningAnswers
from pla_sglang.sim.core import experiment as experiment_module
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, generated_trace, length_model


def moved(*moves: tuple[float, float, int], end: tuple[float, int] | None = None, **fields: Any) -> RequestRecord:
    """Streams from 10 s on. ``moves``: first token, pause, and tokens that the client had; ``end``: time, tokens."""
    record = make_record("a", first_token_s=10.0)
    for first_s, pause_s, tokens in moves:
        came = record.next_attempt("star.migrate", how=MoveKind.PULL, delivered_tokens=tokens)
        came.first_token_s, came.gap_s, record.present = first_s, pause_s, came
    if end is not None:
        record.present.ended_s, record.end = end[0], End(m.Outcome.OK, output_tokens=end[1])
    return record


def test_the_rest_is_measured_against_the_interval_of_before() -> None:
    """100 ms a token before, 50 ms behind a pause of 500 ms."""
    [one] = measure_moves(moved((12.5, 0.5, 21), end=(12.5 + 39 * 0.05, 61)))
    assert (one.interval_before_s, one.tokens_after, one.pause_s) == (pytest.approx(0.1), 40, 0.5)
    told = one.to_dict()
    assert told["interval_after_s"] == pytest.approx(0.05)
    assert told["gain_s"] == pytest.approx(40 * 0.1 - 0.5 - 39 * 0.05)


def test_each_of_several_moves_ends_where_the_next_begins() -> None:
    first, second = measure_moves(moved((12.5, 0.5, 21), (15.0, 0.1, 61), end=(16.0, 81)))
    assert (first.tokens_after, first.time_after_s) == (40, pytest.approx(15.0 - 0.1 - 12.5))
    assert (second.tokens_after, second.interval_before_s) == (20, pytest.approx(2.4 / 39))
    assert [one.attempt.number for one in (first, second)] == [2, 3]


def test_what_cannot_be_measured_is_left_out() -> None:
    assert measure_moves(make_record("a")) == []
    assert measure_moves(moved((12.5, 0.5, 1), end=(13.0, 61))) == [], "no interval before"
    assert measure_moves(moved((12.5, 0.5, 21))) == [], "it runs"
    assert measure_moves(moved((12.5, 0.5, 21), end=(13.0, 21))) == [], "no token after"
    failed = make_record("a", first_token_s=10.0)
    failed.next_attempt("star.migrate", how=MoveKind.PULL)
    assert measure_moves(failed) == []
    retried = moved((12.5, 0.5, 21), end=(13.0, 61))
    retried.present.how = None
    assert measure_moves(retried) == []


async def test_a_policy_s_move_is_told_with_its_prediction_and_what_came_of_it() -> None:
    async with scene(TWO, **ON) as one:
        source = await start(one)
        views = [worker.view for worker in one.plane.table.workers]
        orders = one.plane.policy.orders
        record = one.plane.dispatcher.ledger.records["r"]
        first_s = record.present.first_token_s
        assert first_s is not None
        ordered = Migrate("r", views[source], views[1 - source], 52, FleetReason.STAR_MIGRATE, gain=77.0)
        assert orders.order_move(ordered) is None
        await move_of(one)
        join(one)
        assert one.admin("GET", "/pla/explain/r")[1]["moves"] == []
        one.ended("r", output_tokens=9)
        [told] = one.admin("GET", "/pla/explain/r")[1]["moves"]
        assert (told["attempt"], told["reason"], told["predicted_gain"]) == (2, "star.migrate", 77.0)
        assert (told["pause_s"], told["tokens_after"]) == (0.125, 6)
        series = read_series(one)
        assert series['judged_migrations_total{reason="star.migrate"}'] == 1.0
        expected, measured = (
            series[f'migration_{name}_seconds_total{{reason="star.migrate"}}'] for name in ("expected", "measured")
        )
        assert told["gain_s"] == pytest.approx(expected - measured)
        state = one.plane.series.move_gains.to_dict()["star.migrate"]
        assert state == {"moves": 1, "gain_s": pytest.approx(told["gain_s"], abs=1e-3)}


def read_series(one: Scene) -> dict[str, float]:
    """Value by name and labels, without the prefix."""
    rows = re.findall(r"^pla_router_(\S+) (\S+)$", one.admin("GET", "/metrics")[1], re.MULTILINE)
    return {name: float(value) for name, value in rows}


async def test_operators_see_how_far_predictions_were_off() -> None:
    async with scene(["stateless"] * 3, policy="star", moves=SURVIVAL) as one:
        await fill(one)
        records = one.plane.dispatcher.ledger.records
        for number in range(4):  # of each, one point
            worker = records[f"r{number}"].present.decode
            assert worker is not None
            hear(one, worker, {f"r{number}": 100}, 2 + number)
            one.plane.policy.running.list_decodes(worker.view)
            one.ended(f"r{number}", output_tokens=200 + 100 * number, exact_tokens=True)
        state = one.admin("GET", "/pla/state")[1]["moves"]["lengths"]
        assert state["ended"] == 4
        error = state["error"]
        assert (error["count"], error["unknown"]) == (3, 1), "the first one taught the constant and the curve"
        series = read_series(one)
        for name, key in (("error", "mae_tokens"), ("constant_error", "mae_constant_tokens")):
            total = sum(value for row, value in series.items() if row.startswith(f"length_{name}_tokens_total{{"))
            assert total == pytest.approx(3 * error[key], abs=0.5)
        [told] = one.admin("GET", "/pla/explain/r3")[1]["lengths"]
        assert (told["generated"], told["left_tokens"]) == (100.0, 400.0)
        assert None not in (told["predicted_tokens"], told["constant_tokens"])
        wanted = error["mae_tokens"], error["mae_constant_tokens"]
        await one.until(lambda: wanted in [sample[4] for sample in one.plane.draw_fleet(0.0)["samples"]])


def test_router_and_simulator_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a simulation has looked at, and its ends, told to a router as its instances and relays would."""
    seen: list[RunningAnswers | EndedAnswer] = []

    class Watched(SurvivalPredictor):
        def predict(self, answers: RunningAnswers) -> Floats:
            seen.append(answers)
            return super().predict(answers)

        def observe_end(self, answer: EndedAnswer) -> None:
            seen.append(answer)
            super().observe_end(answer)

    monkeypatch.setitem(experiment_module.PLAIN_LENGTHS, "survival", Watched)
    lengths = (length_model(f"star_sharegpt_{part}") for part in ("input", "output"))
    trace = generated_trace(120, Arrivals(8.0, random.Random(3)), *lengths)
    experiment = Experiment("star", Slo(1.0, 0.05), instances=4, lengths="survival", output_limit_tokens=32_768)
    simulated = run_experiment(experiment, trace).result.lengths
    assert simulated["error"]["count"] > 100

    place = Place(4, lengths="survival")
    for one in seen:
        if isinstance(one, EndedAnswer):
            record = add_answer(place, one.rid, 0, one.prompt_tokens, one.limit_tokens, one.started_s)
            place.running.note_end(record, one.tokens, whole=one.whole, at_s=one.ended_s)
        else:
            look_again(place, one)
    assert place.running.lengths.to_dict() == simulated


def add_answer(place: Place, rid: str, worker: int, prompt: float, limit: float, started_s: float) -> RequestRecord:
    return limit_answer(place.add(rid, worker, tokens=int(prompt), first_token_s=started_s), int(limit))


def look_again(place: Place, answers: RunningAnswers) -> None:
    """A load report with these rows, and a policy that asks for them."""
    place.now_s, worker = answers.now_s, int(answers.place.removeprefix("i"))
    columns = (answers.generated, answers.prompt_tokens, answers.limit_tokens, answers.started_s)
    rows = []
    for rid, generated, *said in zip(answers.rids, *(one.tolist() for one in columns), strict=True):
        add_answer(place, rid, worker, *said)
        rows.append(RequestRow(rid, int(said[0]), int(generated)))
    place.report(worker, *rows)
    place.running.list_decodes(place.workers[worker].view)
