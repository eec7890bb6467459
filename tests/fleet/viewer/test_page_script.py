"""The script of the page, run by Node against a stand-in of the document (``run_page.js``): what it asks and draws."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.recorded_fleet import EVIL, record_run

from pla_sglang.common.legend.colours import PLAN_COLOURS, ROLE_COLOURS, STATE_COLOURS
from pla_sglang.common.legend.explanations import FLEET, WORKER
from pla_sglang.fleet.viewer.history import FleetHistory, Load, Membership, RequestFigures, RequestMove
from pla_sglang.fleet.viewer.page import render_live, render_recorded
from pla_sglang.policy.common.length_errors import ErrorSums
from pla_sglang.policy.common.plan_log import FleetCount, Forecast, Plan, PlanLog
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.view_recording import make_document

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the script of a page runs in Node, which is not installed")
PREFILL, DECODE = Membership("ready", "prefill", ""), Membership("ready", "decode", "")
DEAD = Membership("dead", "prefill", "")
BLUE, RED = ROLE_COLOURS[Role.PREFILL], ROLE_COLOURS[Role.DECODE]
HEAD = {"policy": "arrow", "ready": "3"}
COUNTS_PX = 88.0  # of all instances together in the panel of pools


def run_page(
    page: str, answers: list[tuple[int, Any]] | None = None, pointers: list[tuple[str, float, float]] | None = None
) -> tuple[list[str], list[dict[str, Any]]]:
    """Addresses that it asks for, and what it shows after each answer. ``pointers``: panel, shares of its sides."""
    given = {
        "page": page,
        "answers": [{"status": status, "body": body} for status, body in answers or []],
        "pointers": [{"panel": panel, "x": x, "y": y} for panel, x, y in pointers or []],
    }
    assert NODE is not None
    driver = Path(__file__).with_name("run_page.js")
    done = subprocess.run(
        [NODE, driver], input=json.dumps(given).encode(), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    return said["asked"], said["shown"]


def load(queued_tokens: int, *, kv_used_tokens: int = 0, first_tokens: int = 0) -> Load:
    """Each first token came after 300 ms, of which 200 were predicted."""
    return Load(queued_tokens, 0, 1, kv_used_tokens, 50, first_tokens, 300 * first_tokens, 200 * first_tokens)


def sample(
    history: FleetHistory,
    at_s: float,
    *,
    waiting: int,
    queued_tokens: int,
    first_tokens: int,
    lengths: ErrorSums | None = None,
) -> None:
    loads = {0: load(queued_tokens, kv_used_tokens=250, first_tokens=first_tokens), 1: load(0), 2: load(0)}
    history.add_sample(at_s, loads, open_requests=waiting + 3, waiting=waiting, lengths=lengths)


def answers_of_a_flip() -> list[tuple[int, dict[str, Any]]]:
    """Two polls of three instances: a queue grows, then the last of them is flipped and a request moves there."""
    history = FleetHistory()
    for index, name in enumerate("abc"):
        history.note_instance(index, name, "stateless", 1000)
        history.note_membership(index, PREFILL, 100.0, reason="worker.answers")
    sample(history, 100.0, waiting=0, queued_tokens=0, first_tokens=0)
    sample(history, 104.0, waiting=2, queued_tokens=12_000, first_tokens=10)
    first = history.to_document(104.0, 0.0)
    history.note_membership(2, DECODE, 106.0, reason="arrow.flip_idle", epoch=7)
    history.note_move(RequestMove(107.0, "r1", "a", "c", "pull", "star.migrate", 4_000_000, 0.05))
    sample(history, 108.0, waiting=0, queued_tokens=500, first_tokens=20, lengths=ErrorSums(10, 4000.0, 9000.0))
    second = history.to_document(108.0, 104.0)
    return [(200, {**document, "life": "1", "head": HEAD}) for document in (first, second)]


def heights(panel: dict[str, Any]) -> dict[str, float]:
    """By colour, of the last step of a panel of counts."""
    last = max(float(rect["x"]) for rect in panel["rects"])
    return {rect["fill"]: float(rect["height"]) for rect in panel["rects"] if float(rect["x"]) == last}


def test_the_live_page_shows_queue_pools_and_a_flip_with_its_reason_and_order() -> None:
    pointers = [
        ("rows", 0.982, 0.8),
        ("requests", 0.982, 0.5),
        ("pools", 0.982, 0.5),
        ("rows", 0.05, 0.5),
        ("rows", 0.771, 0.8),
    ]
    asked, [before, after] = run_page(render_live().decode(), answers_of_a_flip(), pointers)
    assert asked == ["/pla/view/since/0", "/pla/view/since/104"]
    assert [shown["status"] for shown in (before, after)] == ["live", "live"]
    assert after["facts"] == {**HEAD, "requests that moved": "1"}

    assert (before["legend"], after["legend"]) == (["prefill"], ["prefill", "decode"])
    [pools], [flipped] = before["panels"]["pools"], after["panels"]["pools"]
    assert heights(pools) == {BLUE: COUNTS_PX}
    assert heights(flipped) == pytest.approx({BLUE: COUNTS_PX * 2 / 3, RED: COUNTS_PX / 3})
    assert [rect["fill"] for rect in after["panels"]["rows"][0]["rects"]] == [BLUE, BLUE, BLUE, RED]
    assert [row[:5] for row in after["tables"]["instances"][1:]] == [
        ["a", "ready", "stateless", "prefill", "both"],
        ["b", "ready", "stateless", "prefill", "both"],
        ["c", "ready", "stateless", "decode", "both"],
    ]

    assert before["tables"]["instances"][1][5:] == ["12,000", "1", "25 %", "10", "300 ms", "200 ms"]
    assert after["tables"]["instances"][1][5:] == ["500", "1", "25 %", "20", "300 ms", "200 ms"]
    strokes = [path["stroke"] for path in before["panels"]["requests"][0]["paths"]]
    assert strokes[-1] == STATE_COLOURS["suspect"], "those that wait"
    assert before["pointed"][1] == ["now", "open: 5", "of these waiting in the router: 2"]

    why = FLEET["arrow.flip_idle"]
    assert after["tables"]["changes"][1] == ["2.0 s ago", "c", "decode", "both", "7", "arrow.flip_idle", why]
    assert after["tables"]["changes"][2][5:] == ["worker.answers", WORKER["answers"]]
    at_the_end, _, counted, outside, at_the_flip = after["pointed"]
    assert at_the_end[:2] == ["c", "now: decode"]
    assert counted[1:] == ["prefill: 2", "decode: 1"]
    assert outside == [""], "left of the axis there is nothing"
    assert at_the_flip[-2:] == ["2.0 s ago: decode (order 7)", f"arrow.flip_idle: {why}"]
    assert (before["panels"]["lengths"], len(after["panels"]["lengths"])) == ([], 1), "once answers were judged"
    assert "1,000" in after["panels"]["lengths"][0]["texts"], "the next round number above 900"
    assert after["tables"]["moves"][1][:6] == ["1.0 s ago", "a", "c", "KV transfer", "4 MB", "50 ms"]


def test_the_live_page_stands_a_router_that_fails_or_starts_again() -> None:
    [first, second] = answers_of_a_flip()
    anew = {**second[1], "life": "2", "samples": first[1]["samples"]}
    asked, shown = run_page(render_live().decode(), [(503, None), first, (500, None), (200, anew), (200, anew)])
    failed = "no new data: the router answers"
    assert [one["status"] for one in shown] == [f"{failed} 503", "live", f"{failed} 500", "live", "live"]
    assert shown[0]["tables"]["instances"][1:] == []
    assert shown[2]["tables"] == shown[1]["tables"], "what was known stays"
    assert asked[-1] == "/pla/view/since/104", "samples of the life before are forgotten"


def test_a_recorded_page_shows_its_whole_span(tmp_path: Path) -> None:
    record_run(tmp_path / "run.jsonl")
    document = make_document(tmp_path / "run.jsonl")
    asked, [shown] = run_page(render_recorded(document), pointers=[("rows", 0.4, 0.8)])
    assert (asked, shown["pausable"]) == ([], False)
    assert shown["title"] == "Recording run.jsonl"
    assert shown["status"] == f"recorded: {shown['span']} from 2023-11-14 22:15:00 UTC"
    names = [f"h{index}{EVIL}" for index in range(3)]
    assert [row[0] for row in shown["tables"]["instances"][1:]] == names
    assert [[row[1], *row[3:5]] for row in shown["tables"]["instances"][1:]] == [
        ["ready", "prefill", "short"],
        ["suspect", "prefill", "both"],
        ["ready", "decode", "both"],
    ]
    changes = [row[:6] for row in shown["tables"]["changes"][1:4]]
    assert changes == [
        ["22:15:15 UTC", names[1], "suspect", "both", "-", "worker.health"],
        ["22:15:10 UTC", names[0], "prefill", "short", "-", "any.other_pair"],
        ["22:15:05 UTC", names[2], "decode", "both", "1", "any.no_data"],
    ]
    assert shown["tiles"][0][:2] == ["instances ready", "2 of 3"]
    assert shown["tiles"][1][:4] == ["TTFT targets met", "72.2 %", "10 of 36 missed", "bad"]
    assert shown["tiles"][3][:3] == ["P99 TTFT", "310 ms", "target 1 s"], "in the middle of the bucket of 300 ms"
    assert {"22:15:00", "22:15:10", "UTC"} <= set(shown["panels"]["rows"][0]["texts"]), "round times of the day"
    assert shown["tables"]["moves"][1][3:6] == ["KV transfer", "1.05 MB", "50 ms"]
    assert len(shown["panels"]["planner"]) > 0
    assert shown["pointed"][0][0] == names[2]
    assert {rect["fill"] for rect in shown["panels"]["rows"][0]["rects"]} >= {BLUE, RED, STATE_COLOURS["suspect"]}


def count_requests(history: FleetHistory, at_s: float, *, late: int, failed: int = 0) -> None:
    """10 streams, of which some are late or have failed, in the 2 s before."""
    figures = RequestFigures()
    for number in range(10):
        is_late = number < late
        figures.add_first_token(4.0 if is_late else 0.25)
        figures.add_end(number < failed, not is_late, True, 0.02, 50)
    history.add_sample(at_s, {}, open_requests=0, waiting=0, figures=figures)


def show_fleet(history: FleetHistory, now_s: float, ttft_s: float = 1.0) -> dict[str, Any]:
    """The live page, whose clock was at 2023-11-14 22:13:20 when that of the history was 0."""
    targets = {"ttft_s": ttft_s, "tpot_s": 0.05}
    extra = {"life": "1", "head": HEAD, "clock_start_s": 1_700_000_000.0, "targets": targets}
    return run_page(render_live().decode(), [(200, {**history.to_document(now_s), **extra})])[1][0]


def test_the_tiles_say_whether_targets_are_met() -> None:
    history = FleetHistory()
    for index in range(2):
        history.note_instance(index, f"h{index}", "stateless", 1000)
        history.note_membership(index, PREFILL, 100.0, reason="worker.answers")
    for place in range(40):
        count_requests(history, 102.0 + 2 * place, late=5 if place < 10 else 0, failed=int(place == 39))
    shown = show_fleet(history, 180.0)
    assert [tile[:4] for tile in shown["tiles"]] == [
        ["instances ready", "2 of 2", "", "good"],
        ["TTFT targets met", "100 %", "0 of 300 missed", "good"],
        ["TPOT targets met", "100 %", "0 of 300 missed", "good"],
        ["P99 TTFT", "239 ms", "target 1 s", "good"],
        ["P99 TPOT", "19.4 ms", "target 50 ms", "good"],
        ["requests/s", "5", "250 tokens/s", ""],
        ["errors", "0.333 %", "1 of 300 requests", "fair"],
    ]
    assert {tile[4] for tile in shown["tiles"]} == {1}, "each has its curve"
    assert shown["status"] == "live, 22:16:20 UTC"
    assert len(shown["panels"]["latency"]) == 2
    assert shown["troubles"] == []
    assert [shown["tables"][name] for name in ("moves",)] == [[["none in this span"]]]


@pytest.mark.parametrize(("ttft_s", "is_drawn"), [(0.5, True), (20.0, False)])
def test_a_target_far_above_all_times_is_told_and_not_drawn(ttft_s: float, is_drawn: bool) -> None:
    """All times would lie on the axis."""
    history = FleetHistory()
    for place in range(4):
        count_requests(history, 102.0 + 2 * place, late=0)
    panel = show_fleet(history, 110.0, ttft_s)["panels"]["latency"][0]
    assert any("target" in path.get("class", "") for path in panel["paths"]) is is_drawn
    assert ("target 20 s: above" in panel["texts"]) is not is_drawn


def lose(history: FleetHistory, *, again: str) -> dict[str, Any]:
    """The second of two is lost at 150; another one at its address is ``again`` since then."""
    for index, name in enumerate("ab"):
        history.note_instance(index, name, "stateless", 1000)
        history.note_membership(index, PREFILL, 100.0, reason="worker.answers")
    history.note_membership(1, Membership("suspect", "prefill", ""), 149.0, reason="worker.health")
    history.note_membership(1, Membership("dead", "prefill", ""), 150.0, reason="worker.no_answer")
    history.note_instance(2, "b", "" if again == "starting" else "stateless", None)
    history.note_membership(2, Membership(again, "mixed", ""), 150.0, reason="worker.added")
    return show_fleet(history, 180.0)


def test_a_lost_instance_is_named_with_its_time() -> None:
    shown = lose(FleetHistory(), again="starting")
    why = WORKER["no_answer"]
    assert shown["troubles"] == [f"b lost since 22:15:50 UTC (30 s): {why}"]
    assert shown["tiles"][0][:4] == ["instances ready", "1 of 2", "1 lost, 1 starting", "bad"]
    assert [row[:3] for row in shown["tables"]["instances"][1:]] == [
        ["a", "ready", "stateless"],
        ["b", "lost 22:15:50 UTC", "stateless"],
        ["b", "starting", "-"],
    ]
    assert [rect for rect in shown["panels"]["rows"][0]["rects"] if rect.get("class") == "lost"]


def test_it_is_no_trouble_once_another_one_is_ready_at_its_address() -> None:
    shown = lose(FleetHistory(), again="ready")
    assert (shown["troubles"], shown["tiles"][0][:4]) == ([], ["instances ready", "2 of 2", "", "good"])


def test_an_address_that_was_lost_twice_is_one_trouble() -> None:
    history = FleetHistory()
    for index, (ready_s, dead_s) in enumerate([(100.0, 120.0), (130.0, 150.0)]):
        history.note_instance(index, "a", "stateless", 1000)
        history.note_membership(index, PREFILL, ready_s, reason="worker.answers")
        history.note_membership(index, DEAD, dead_s, reason="worker.no_answer")
    history.note_instance(2, "a", "", None)
    history.note_membership(2, Membership("starting", "mixed", ""), 150.0, reason="worker.added")
    shown = show_fleet(history, 180.0)
    assert [text.partition(" (")[0] for text in shown["troubles"]] == ["a lost since 22:15:50 UTC"]
    assert shown["tiles"][0][:3] == ["instances ready", "0 of 1", "1 lost, 1 starting"]


@pytest.mark.parametrize(("reason", "before"), [("worker.removed", "ready"), ("worker.no_answer", "draining")])
def test_one_that_was_removed_or_had_finished_is_no_trouble(reason: str, before: str) -> None:
    history = FleetHistory()
    history.note_instance(0, "a", "stateless", 1000)
    history.note_membership(0, Membership(before, "prefill", ""), 100.0)
    history.note_membership(0, DEAD, 150.0, reason=reason)
    assert show_fleet(history, 180.0)["troubles"] == []


def log_of_a_surge() -> PlanLog:
    """One more is ordered at 103 and ready at 105; another start fails. The plan at 107 takes one back."""
    log = PlanLog()
    for at_s, planned, load, forecast in ((101.0, 2, 5.0, 8.0), (103.0, 3, 9.0, 12.0), (107.0, 2, 3.0, None)):
        log.plans.append(Plan(at_s, planned, {"requests": Forecast(load, forecast)}))
    for at_s, ready, starting in ((100.0, 2, 0), (103.0, 2, 1), (105.0, 3, 0), (108.0, 3, 0)):
        log.note_fleet(FleetCount(ready, starting, 0), 0.25 * (at_s - 100.0), at_s)
    log.note_start(103.0, 105.0, "ready")
    log.note_start(103.0, 104.0, "failed")
    return log


def show_plan(log: PlanLog | None) -> dict[str, Any]:
    answers = answers_of_a_flip()
    document = answers[-1][1] | {"plan": None if log is None else log.to_document()}
    pointers = [("planner", 0.7, 0.5)] if log else []
    return run_page(render_live().decode(), [(200, document)], pointers)[1][0]


def read_steps(path: dict[str, str], height: float, most: float) -> list[tuple[float, float]]:
    """Pixels from the left and values, of a line in a panel."""
    points = [point.split(",") for point in path["d"].replace("M", "L").split("L")[1:]]
    return [(float(x), round((height - float(y)) / (height - 2) * most, 1)) for x, y in points]


def test_what_the_planner_wants_and_expects_stands_beside_what_there_is() -> None:
    shown = show_plan(log_of_a_surge())
    instances, requests, gpu_hours, starts = shown["panels"]["planner"]
    fills = {rect["fill"] for rect in instances["rects"]}
    assert fills == {PLAN_COLOURS["ready"], PLAN_COLOURS["starting"]}
    assert [value for _, value in read_steps(instances["paths"][0], 90, 3)] == [2.0, 2.0, 3.0, 3.0, 2.0, 2.0]
    load, forecast = (read_steps(path, 56, 12.0) for path in requests["paths"])
    assert [value for _, value in load] == [9.0, 9.0, 3.0, 3.0], "of the time before each plan"
    assert [value for _, value in forecast] == [8.0, 8.0, 12.0, 12.0], "of the time after it"
    assert load[0][0] == forecast[0][0], "the first plan"
    assert "GPU-hours" in gpu_hours["texts"]
    assert [path["stroke"] for path in starts["paths"]] == [PLAN_COLOURS["ready"], STATE_COLOURS["suspect"]]
    assert shown["pointed"][0][1:] == ["planned: 3", "ready: 3", "starting: 0", "draining: 0"]
    assert show_plan(None)["panels"]["planner"] == [], "without a planner"
