"""What a request waits for where small prefills go first. Prefill takes 10 ms + 1 ms a token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.test_properties import EXAMPLES
from support.combined import arrow, combined, cost
from support.fleets import fleet, mixed, request

from pla_sglang.policy.combined.sized_backlog import SizedBacklog
from pla_sglang.policy.interface.fleet import InstanceView, RequestView


def queue(instance: InstanceView, one: RequestView, sign: int = 1) -> None:
    """What a driver does with the sums of the view."""
    new, history = one.new_tokens(instance), one.history_tokens(instance)
    instance.queued_prefills += sign
    instance.queued_tokens += sign * new
    instance.queued_attention += sign * new * (new + 2 * history)
    instance.queued_history_tokens += sign * history


@pytest.mark.parametrize(
    ("sent", "waits_for"),
    [
        ([4000], (0, 0)),
        ([600], (1, 600)),
        ([1000, 2000, 500], (2, 1500)),
        ([100, 3], (2, 103)),
        ([], (0, 0)),
    ],
    ids=["a larger one", "a smaller one", "one of its own size class", "shorts", "nothing"],
)
def test_a_request_waits_for_those_that_are_no_larger(sent: list[int], waits_for: tuple[int, int]) -> None:
    backlog, view = SizedBacklog(), fleet(mixed())
    [instance] = view.instances
    for number, tokens in enumerate(sent):
        one = request(tokens, rid=number)
        queue(instance, one)
        backlog.add(one, instance)
    assert backlog.ahead_of(request(900, rid="new"), instance)[:2] == waits_for


def test_shorts_are_one_size() -> None:
    backlog, view = SizedBacklog(), fleet(mixed())
    [instance] = view.instances
    other = request(250, rid="other")
    queue(instance, other)
    backlog.add(other, instance)
    assert backlog.ahead_of(request(3), instance)[0] == 1


@pytest.mark.parametrize("smallest_tokens", [127, 255, 511])
def test_half_and_twice_of_what_is_short(smallest_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 3 tokens waits for what is short, and for nothing longer."""
    monkeypatch.setattr("pla_sglang.policy.combined.sized_backlog.SMALLEST_TOKENS", smallest_tokens)
    for tokens, waits_for in ((smallest_tokens, 1), (smallest_tokens + 1, 0)):
        backlog, view = SizedBacklog(), fleet(mixed())
        [instance] = view.instances
        other = request(tokens, rid="other")
        queue(instance, other)
        backlog.add(other, instance)
        assert backlog.ahead_of(request(3), instance)[0] == waits_for


def send(backlog: SizedBacklog, instance: InstanceView, *tokens: int) -> list[RequestView]:
    sent = [request(new_tokens, rid=new_tokens) for new_tokens in tokens]
    for one in sent:
        queue(instance, one)
        backlog.add(one, instance)
    return sent


def test_of_larger_prompts_the_one_under_way_alone_is_ahead() -> None:
    """And only of a prompt that needs several passes itself: a shorter one goes between two of its passes."""
    backlog, view = SizedBacklog(), fleet(mixed())
    [instance] = view.instances
    under_way, *_ = send(backlog, instance, 40_000, 90_000, 20_000)
    assert backlog.ahead_of(request(5_000), instance) == (1, 40_000, 40_000**2, 0)
    assert backlog.ahead_of(request(2_000), instance)[:2] == (0, 0)
    backlog.remove(under_way)
    queue(instance, under_way, -1)
    assert backlog.ahead_of(request(5_000), instance)[:2] == (1, 20_000), "the smallest is next"
    assert backlog.ahead_of(request(40_000), instance)[:2] == (1, 20_000), "it is in its own class and counts once"


def test_the_end_of_one_that_waits_leaves_the_one_under_way() -> None:
    backlog, view = SizedBacklog(), fleet(mixed())
    [instance] = view.instances
    _, waiting = send(backlog, instance, 40_000, 20_000)
    backlog.remove(waiting)
    queue(instance, waiting, -1)
    assert backlog.ahead_of(request(5_000), instance)[:2] == (1, 40_000)


@pytest.mark.parametrize(
    ("chunk_max_tokens", "passes", "waits"),
    [(1024, 1024, 1025), (None, 4096, 4097), (4096, 4096, 4097), (8192, 8192, 8193), (100_000, 39_000, None)],
)
def test_who_needs_several_passes_follows_from_the_chunk_of_the_instance(
    chunk_max_tokens: int | None, passes: int, waits: int | None
) -> None:
    """Of two prompts one passes another of 80,000 tokens, one waits for it; beside another instance."""
    backlog, view = SizedBacklog(), fleet(mixed(chunk_max_tokens=77), mixed(chunk_max_tokens=chunk_max_tokens))
    instance = view.instances[1]
    send(backlog, instance, 80_000)
    assert backlog.ahead_of(request(passes), instance)[0] == 0
    if waits is not None:
        assert backlog.ahead_of(request(waits), instance)[0] == 1


def test_what_a_prefix_cache_has_makes_a_request_small() -> None:
    backlog, view = SizedBacklog(), fleet(mixed())
    [instance] = view.instances
    large = request(4000, rid="large")
    queue(instance, large)
    backlog.add(large, instance)
    assert backlog.ahead_of(request(4100, cached={0: 4000}), instance) == (0, 0, 0, 0)
    assert backlog.ahead_of(request(4100), instance)[0] == 1


def test_prefills_of_others_count_as_if_they_went_first() -> None:
    [instance] = fleet(mixed(queued_prefills=1, queued_tokens=9000)).instances
    assert SizedBacklog().ahead_of(request(10), instance)[:2] == (1, 9000)


def test_a_view_that_knows_of_an_end_before_its_event_is_no_negative_queue() -> None:
    backlog, view = SizedBacklog(), fleet(mixed())
    [instance] = view.instances
    backlog.add(request(4000, rid="large"), instance)
    assert backlog.ahead_of(request(10), instance) == (0, 0, 0, 0)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["add", "remove"]), st.integers(1, 20_000)), max_size=30))
def test_nothing_is_left_when_all_have_ended(events: list[tuple[int, str, int]]) -> None:
    """Also of those that were sent again elsewhere, or have ended twice."""
    backlog, view = SizedBacklog(), fleet(mixed(), mixed())
    for rid, event, tokens in events:
        one = request(tokens, rid=rid)
        if event == "add":
            backlog.add(one, view.instances[tokens % 2])
        else:
            backlog.remove(one)
    for rid in range(6):
        backlog.remove(request(rid=rid))
    assert len(backlog) == 0
    for instance in view.instances:
        instance.queued_prefills, instance.queued_tokens = 1, 77
        assert backlog.ahead_of(request(1), instance)[:2] == (1, 77)


def test_a_short_goes_to_the_instance_whose_larger_ones_it_passes() -> None:
    """i0 has a prompt of 400 tokens, i1 one of 300; a request of 20 with a prefix at i0 passes it there."""
    for small_first, chosen in ((True, "i0"), (False, "i1")):
        over = arrow()
        policy = combined(cost(over, small_first=small_first, decode_weight=0.0, work_weight=0.0), over)
        view = fleet(mixed(), mixed())
        for tokens, instance in zip((400, 300), view.instances, strict=True):
            other = request(tokens, rid=tokens)
            view_of_one = fleet(mixed(), mixed())
            view_of_one.instances[1 - instance.index].queued_tokens = 10_000
            view_of_one.instances[1 - instance.index].queued_prefills = 1
            assert policy.dispatch(other, view_of_one, 0.0).prefill is view_of_one.instances[instance.index]
            queue(instance, other)
        short = request(60, rid="short", cached={0: 40})
        answer = policy.dispatch(short, view, 0.0)
        assert answer.prefill is not None
        assert answer.prefill.name == chosen
        if small_first:
            assert answer.predicted_ttft_s == pytest.approx(0.01 + 0.02)


def test_first_tokens_and_ends_are_taken_off() -> None:
    over = arrow()
    part = cost(over, small_first=True)
    policy, view, backlog = combined(part, over), fleet(mixed()), part.backlog
    assert backlog is not None
    for rid in ("first token", "aborted"):
        policy.dispatch(request(400, rid=rid), view, 0.0)
    assert len(backlog) == 2
    policy.on_first_token(request(400, rid="first token"), view.instances[0], 1.0)
    policy.on_finish(request(400, rid="aborted"), 0, 1.0)
    assert len(backlog) == 0
