"""``bench.cost.router_cost``: its mock, and what it makes of goals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cost.router_cost.bench import MOCKS, RouterArm, make_arms, running_router_arm
from bench.cost.router_cost.client import Client, make_probes, running_client
from bench.cost.router_cost.figures import (
    ARMS,
    GOALS,
    LIMITS,
    MOVABLE,
    MOVABLE_MISSED,
    TLS,
    cpu_ratios,
    missed,
    page,
    split_ms,
)
from bench.cost.router_cost.movable import check_movable
from bench.harness.bench import BenchError
from pla_sglang.testing.mock_instance import Mock, StatelessMock, read_wishes, request_body, running_mocks

GOOD = {goal.key: goal.limit for goal in GOALS} | {"errors": 0}


class Written:
    """What a mock instance writes."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def result(*, movable_us: float = 24.0, **ours: float) -> dict[str, Any]:
    by_arm = {arm: dict(GOOD) for arm in ARMS}
    by_arm["ours"] |= ours
    by_arm[MOVABLE]["us_per_event"] = movable_us
    known = {"rounds": 3, "duration_s": 2.0, "hardware": "h", "plugin_commit": "c", "seed": 1}
    return {**by_arm, "split_added_ttft_p50_ms": split_ms(by_arm), "goals_missed": missed(by_arm), **known}


def test_figures_at_their_limits_are_good() -> None:
    assert result()["goals_missed"] == []
    assert "missed" not in page(result())


@pytest.mark.parametrize(
    ("ours", "late"),
    [
        ({"us_per_event": 24.1}, ["us_per_event"]),
        ({"requests_per_s": 7_999.0}, ["requests_per_s"]),
        ({"requests_per_s": 9_000.0}, []),
        ({"added_ttft_p50_ms": 0.81}, ["added_ttft_p50_ms", "split_added_ttft_p50_ms"]),
    ],
)
def test_what_is_missed_is_said(ours: dict[str, float], late: list[str]) -> None:
    made = result(**ours)
    assert made["goals_missed"] == late
    assert page(made).count("(missed)") == len([key for key in late if key in GOOD])


def test_what_was_not_measured_is_missed() -> None:
    assert len(missed({"ours": {}})) == len(GOALS) + 2


def test_of_the_movable_arm_only_the_cost_of_an_event_has_a_goal() -> None:
    made = result(movable_us=24.1)
    assert made["goals_missed"] == [MOVABLE_MISSED] == ["ours_movable.us_per_event"]
    [row] = [row for row in page(made).splitlines() if "(missed)" in row]
    assert [cell.strip() for cell in row.split("|")][ARMS.index(MOVABLE) + 3] == "24.1 (missed)"


def test_a_result_from_before_an_arm_has_a_page() -> None:
    made = result()
    del made[MOVABLE]
    assert MOVABLE not in page(made)


@pytest.mark.parametrize("step", [1, 700, 100_000])
def test_the_mock_reads_a_request_however_it_is_cut(step: int) -> None:
    body = request_body(events=2, stream=True, tokens=1000)
    assert read_wishes(body) == (2, 0.0, True)
    reversed_ = json.dumps(dict(reversed(json.loads(body).items()))).encode()
    for one in (body, reversed_):
        mock, written = Mock("decode", 1, {}), Written()
        mock.connection_made(written)  # type: ignore[arg-type]
        data = b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(one), one)
        for start in range(0, len(data), step):
            mock.data_received(data[start : start + step])
        assert written.data.count(b'data: {"text"') == 2
        assert written.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_the_mock_answers_who_tries_http2_first() -> None:
    mock, written = Mock("decode", 1, {}), Written()
    mock.connection_made(written)  # type: ignore[arg-type]
    mock.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30))
    assert written.data.startswith(b"HTTP/1.1 200 OK")


def ask_stateless(body: bytes) -> bytes:
    """What a stateless mock at port 7 answers."""
    mock, written = StatelessMock("stateless", 7, {}), Written()
    mock.connection_made(written)  # type: ignore[arg-type]
    mock.data_received(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    return written.data


def test_a_stateless_mock_says_token_ids_where_it_is_asked() -> None:
    body = request_body(events=3, stream=True)
    plain = ask_stateless(body)
    marked = ask_stateless(request_body(events=3, stream=True, marked=True))
    assert plain.count(b'data: {"text"') == marked.count(b'data: {"text"') == 3
    assert b": pla" not in plain
    assert marked.count(b": pla-prompt ") == 1
    assert marked.count(b": pla 1000") == 3


@pytest.mark.parametrize(("port", "events"), [(7, 1), (8, 3)])
def test_a_stateless_mock_knows_its_prefill_legs(port: int, events: int) -> None:
    leg = (
        b'{"bootstrap_host":"h","bootstrap_port":%d,"bootstrap_room":1,' % port
        + request_body(events=3, stream=True)[1:]
    )
    assert ask_stateless(leg).count(b'data: {"text"') == events


# -- the arm whose streams can move, as it is measured -----------------------------------------------------------------


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RouterArm]]:
    with running_mocks(*MOCKS) as mocks:
        yield {arm.name: arm for arm in make_arms(mocks, tmp_path_factory.mktemp("arms"))}


@pytest.fixture
def movable_arm(arms: dict[str, RouterArm]) -> RouterArm:
    return arms[MOVABLE]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with running_client() as running:
        yield running


@pytest.mark.parametrize("name", [TLS, LIMITS])
def test_the_client_speaks_tls_and_brings_its_key(
    name: str, arms: dict[str, RouterArm], client: Client, tmp_path: Path
) -> None:
    arm = arms[name]
    assert bool(arm.ca) is (name == TLS)
    with running_router_arm(arm, tmp_path):
        for key, errors in ((arm.key, False), ("wrong", name == LIMITS)):
            client.begin(make_probes(arm.port, duration_s=0.2, seed=1, quickack=False, ca=arm.ca, key=key)["closed"])
            done = client.read_line()
            assert bool(done["errors"]) is errors, done["error"]
            assert bool(done["completed"]) is not errors


def test_ratios_are_over_the_arm_without_either() -> None:
    costs = {"ours": 0.1, TLS: 0.17, LIMITS: 0.102}
    by_arm = {arm: {"cpu_ms_per_request": cost} for arm, cost in costs.items()}
    assert cpu_ratios(by_arm) == {TLS: {"cpu_ms_per_request": 1.7}, LIMITS: {"cpu_ms_per_request": 1.02}}
    assert TLS in missed(by_arm)
    assert LIMITS not in missed(by_arm)


def test_the_router_keeps_token_ids_and_takes_them_out(movable_arm: RouterArm, client: Client, tmp_path: Path) -> None:
    with running_router_arm(movable_arm, tmp_path):
        check_movable(movable_arm.port, client)
        plan = make_probes(movable_arm.port, duration_s=0.2, seed=1, quickack=False)["stream_200"]
        client.begin(plan)
        done = client.read_line()
    assert done["completed"] > 10
    assert done["errors"] == 0, done["error"]


def test_an_arm_whose_streams_do_not_move_is_found_out(movable_arm: RouterArm, client: Client, tmp_path: Path) -> None:
    flags = list(movable_arm.flags)
    flags[flags.index("--migration") + 1] = "off"
    with (
        running_router_arm(RouterArm("off", tuple(flags), module=movable_arm.module, port=movable_arm.port), tmp_path),
        pytest.raises(BenchError, match="not: 0 bytes kept of 8 streams"),
    ):
        check_movable(movable_arm.port, client)


def test_the_client_does_not_take_comments_for_an_answer(client: Client) -> None:
    with running_mocks("stateless") as mocks:
        plan = make_probes(int(mocks.urls[0].rpartition(":")[2]), duration_s=0.1, seed=1, quickack=False)["stream_200"]
        client.begin({**plan, "body": {**plan["body"], "marked": True}})
        done = client.read_line()
    assert done["errors"] > 0
    assert done["error"] == "a comment of the instance's"
