from __future__ import annotations

import json

import pytest

from bench.check.leftovers import errors_in, load_counts, request_gauges
from bench.compare.hol import last_tokens
from bench.harness.comparison import all_identical, best_stock, headline_arm, identity_to_first
from bench.harness.load_client import Answer, Outcome, Request, Run
from bench.harness.stats import arm_figures, compare_outputs, per_round, problems, ratios, warnings


def outcome(rid: str, kind: str, ttft_s: float, *, at_s: float = 0.0, output: tuple[int, ...] = (1, 2)) -> Outcome:
    request = Request(rid, kind, at_s, (1,) * 10, len(output))
    first_s = at_s + ttft_s
    return Outcome(request, sent_s=at_s, token_s=[first_s], done_s=first_s + 0.1, output_ids=output)


def run_of(*outcomes: Outcome, cpu: float = 0.0) -> Run:
    return Run(outcomes, cpu)


def event(tokens: list[int], finish: object = None) -> bytes:
    body = {"output_ids": tokens, "meta_info": {"finish_reason": finish, "cached_tokens": 4, "num_retractions": 1}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


LENGTH = {"type": "length", "length": 2}


def test_latency_counts_from_the_scheduled_arrival() -> None:
    late = outcome("a", "short", 0.5, at_s=2.0)
    late.sent_s = 2.3  # the client was late: its lag stays inside the latency
    assert late.ttft_s == pytest.approx(0.5)
    assert late.lag_s == pytest.approx(0.3)
    assert late.tpot_s == pytest.approx(0.1)


def parsed(raw: bytes, wanted: int = 2) -> Outcome:
    answer = Outcome(Request("a", "short", 0.0, (1,), wanted), sent_s=0.0, status=200, raw=bytearray(raw))
    answer.settle()
    return answer


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("cumulative", event([1]) + event([1, 2], LENGTH) + b"data: [DONE]\n\n"),
        ("incremental", event([1]) + event([2], LENGTH) + b"data: [DONE]\n\n"),
    ],
)
def test_a_stream_is_read_in_both_forms(name: str, raw: bytes) -> None:
    assert (parsed(raw).error, parsed(raw).output_ids) == (None, (1, 2)), name


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "ended before its last token"),
        (b'data: {"output_', "the stream is broken"),
        (b'data: {"error": {"message": "boom"}}\n\n', "boom"),
        (event([1]), "before its last token"),
        (event([1], {"type": "abort", "message": "gone"}), "abort"),
        (event([1, 2], {"type": "stop"}), "finished with stop"),
        (event([1], LENGTH), "1 tokens instead of 2"),
    ],
)
def test_what_is_wrong_with_a_stream_is_said(raw: bytes, message: str) -> None:
    assert message in (parsed(raw).error or "")


def test_a_status_that_is_not_200_is_an_error() -> None:
    answer = Answer(sent_s=0.0, status=503, raw=bytearray(b"busy"))
    answer.settle()
    assert answer.error == "status 503: busy"


def test_settling_reads_the_figures_and_drops_the_bytes() -> None:
    answer = parsed(event([5, 6], LENGTH))
    assert (answer.output_ids, answer.cached_tokens, answer.retractions, len(answer.raw)) == ((5, 6), 4, 1, 0)


def test_ratios_are_paired_by_round() -> None:
    stock = [run_of(outcome("a", "short", 1.0)), run_of(outcome("b", "short", 4.0))]
    ours = [run_of(outcome("a", "short", 0.1)), run_of(outcome("b", "short", 0.8))]
    found = ratios(stock, ours)
    assert found["short_ttft_p99_gain"].low == pytest.approx(5)
    assert found["short_ttft_p99_gain"].high == pytest.approx(10)
    assert found["short_ttft_p50_ratio"].high == pytest.approx(0.2)
    assert "long_ttft_p90_ratio" not in found


def test_throughput_counts_both_directions_over_the_makespan() -> None:
    run = run_of(outcome("a", "short", 0.9), outcome("b", "long", 1.9, at_s=1.0))
    assert run.makespan_s == pytest.approx(3.0)
    assert run.tokens_per_s == pytest.approx(24 / 3.0)


def test_identity_is_per_arm_and_ours_decide() -> None:
    stock, ours = [run_of(outcome("a", "short", 1))], [run_of(outcome("a", "short", 2))]
    peer = [run_of(outcome("a", "short", 1, output=(1, 3)), outcome("b", "short", 1))]
    found = identity_to_first({"stock": stock, "ours": ours, "spf": peer}, {})
    assert (found["ours"].identical, found["ours"].compared) == (True, 1)
    assert (found["spf"].identical, found["spf"].different) == (False, ("a",))
    assert all_identical(found) is True
    assert all_identical({"spf": found["spf"]}) is False


def test_one_arm_has_nothing_to_compare() -> None:
    assert all_identical(identity_to_first({"stock": [run_of(outcome("a", "short", 1))]}, {})) is None


def test_answers_of_failed_requests_are_not_compared() -> None:
    bad = outcome("a", "short", 1, output=(9,))
    bad.error = "status 500"
    assert compare_outputs([run_of(bad)], [run_of(outcome("a", "short", 1))]).identical is None


def test_failed_requests_count_as_problem_and_not_as_latency() -> None:
    bad = outcome("b", "short", 9.0)
    bad.error = "status 500"
    run = run_of(outcome("a", "short", 1.0), bad)
    assert per_round([run], "short", "max") == [1.0]
    assert arm_figures([run])["failed"] == 1
    assert problems({"stock": [run]}) == ["stock, round 1: 1 of 2 requests failed, first: status 500"]


def test_a_client_in_the_way_is_a_warning() -> None:
    late = outcome("a", "short", 1.0)
    late.sent_s = 0.5
    runs = {"ours": [run_of(late, cpu=0.9)]}
    found = warnings(runs)
    assert problems(runs) == []
    assert len(found) == 2
    assert "500 ms late" in found[0]
    assert "90% of a core" in found[1]


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (["stock", "spf", "ours"], "ours"),
        (["stock", "spf", "no-window"], "no-window"),
        (["stock", "spf"], "spf"),
        (["stock"], None),
    ],
)
def test_headline_arm(arms: list[str], expected: str | None) -> None:
    assert headline_arm(arms) == expected


def test_gauges_of_a_metrics_page() -> None:
    page = (
        "# TYPE sglang:num_queue_reqs gauge\n"
        'sglang:num_queue_reqs{tp_rank="0"} 2.0\nsglang:num_queue_reqs{tp_rank="1"} 1.0\n'
        "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 0.0\n"
        "# TYPE sglang:queue_time counter\nsglang:queue_time 7.0\n"
        "# TYPE sglang:token_usage gauge\nsglang:token_usage 0.5\n"
    )
    assert request_gauges(page) == {"sglang:num_queue_reqs": 3.0, "sglang:num_running_reqs": 0.0}


def test_counts_of_a_load_entry() -> None:
    load = {"num_running_reqs": 0, "num_waiting_reqs": 2, "num_used_tokens": 9, "queues": {"waiting": 2}}
    assert load_counts(load) == {"num_running_reqs": 0, "num_waiting_reqs": 2, "queues.waiting": 2}


def test_errors_of_a_log() -> None:
    log = (
        "INFO all fine\n[12:00] ERROR: bad\nTraceback (most recent call last):\ntoken_to_kv_pool memory leak detected\n"
    )
    assert len(errors_in(log)) == 3


def test_last_tokens_are_compared_by_round() -> None:
    """An outcome of these ends 0.1 s after its first token: 1.1 and 2.1 s against 0.4 and 1.0 s."""
    stock = [run_of(outcome("a", "short", ttft_s)) for ttft_s in (1.0, 2.0)]
    ours = [run_of(outcome("a", "short", ttft_s)) for ttft_s in (0.3, 0.9)]
    keys = last_tokens({"stock": stock, "ours": ours})
    assert keys["short_last_token_p50_ratio"] == pytest.approx((0.4 / 1.1 + 1.0 / 2.1) / 2, abs=1e-4)
    assert keys["short_last_token_p50_vs_pure"] is None
    assert (
        last_tokens({"ours": stock, "ride": ours})["short_last_token_p50_vs_pure"] == keys["short_last_token_p50_ratio"]
    )
    longs = [run_of(outcome("a", "long", 1.0))]
    assert set(last_tokens({"stock": longs, "ours": longs}).values()) == {None}


def test_the_best_of_stock_is_the_arm_with_the_least_p99_of_shorts() -> None:
    def rounds(short_s: float, long_s: float) -> list[Run]:
        return [run_of(outcome("s", "short", short_s * at), outcome("l", "long", long_s)) for at in (1.0, 1.2)]

    runs = {"stock": rounds(8.0, 4.0), "hrrn": rounds(2.0, 5.0), "spf": rounds(0.5, 6.0), "ours": rounds(1.0, 3.0)}
    found = best_stock(runs | {"peer": rounds(0.1, 1.0)})
    assert found["best_stock"] == "spf", "a peer is no arm of this SGLang"
    against = found["vs_best_stock"]
    assert against["short_ttft_p99_gain"]["median"] == pytest.approx(0.5)  # a loss stays one
    assert against["long_ttft_p90_ratio"]["median"] == pytest.approx(0.5)
    assert best_stock({name: runs[name] for name in ("stock", "ours")}) == {}
    assert best_stock({name: runs[name] for name in ("stock", "spf")})["vs_best_stock"] == {}
    assert best_stock(runs | {"stock": rounds(0.2, 4.0)})["best_stock"] == "stock"
