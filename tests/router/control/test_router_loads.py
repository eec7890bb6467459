"""Between reports the load book says what an instance has to do, whatever the report had counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.policy.fleet import InstanceView
from pla_sglang.router.control.loads import FIELDS, Amounts, LoadBook, Phase, Report, Tracked


def amounts(view: InstanceView) -> Amounts:
    return Amounts(*(getattr(view, name) for name in FIELDS))


def book(settle_s: float = 0.05) -> LoadBook:
    return LoadBook(InstanceView(0, "i0"), settle_s=settle_s)


def prompt(new: int, now_s: float, *, history: int = 0, decodes_here: bool = True) -> Tracked:
    return Tracked(new, history, now_s, Phase.QUEUED, decodes_here)


def test_without_reports_the_own_requests_count() -> None:
    one = book()
    one.send(("a", 1), prompt(100, 0.0, history=20))
    one.send(("b", 1), prompt(10, 0.1))
    assert amounts(one.view) == Amounts(2, 110, 100 * 140 + 100, 20)
    one.start(("a", 1), 0.2)
    assert amounts(one.view) == Amounts(1, 10, 100, 0, 1, 120)
    one.start(("a", 1), 0.3)  # told twice
    one.end(("a", 1), 0.4)
    one.end(("a", 1), 0.5)
    one.end(("b", 1), 0.6)
    assert amounts(one.view) == Amounts()
    assert one.is_idle()


def test_a_prefill_instance_is_done_with_its_prefill() -> None:
    one = book()
    one.send(("a", 1), prompt(100, 0.0, decodes_here=False))
    one.start(("a", 1), 0.2)
    assert amounts(one.view) == Amounts()
    assert not one.is_idle()  # the KV is still being sent
    one.end(("a", 1), 0.3)
    assert one.is_idle()


def test_a_decode_instance_waits_for_the_kv() -> None:
    one = book()
    one.send(("a", 1), Tracked(120, 0, 0.0, Phase.COMING, True))
    assert amounts(one.view) == Amounts(waiting_decodes=1, waiting_decode_tokens=120)
    one.start(("a", 1), 0.2)
    assert amounts(one.view) == Amounts(running=1, context_tokens=120)


def test_what_was_sent_just_before_a_report_is_added() -> None:
    one = book(settle_s=0.05)
    one.send(("old", 1), prompt(100, 0.0))
    one.send(("new", 1), prompt(30, 0.98))
    one.report(Report(Amounts(1, 100, 10_000, 0)), 1.0)  # it cannot have counted the new one
    assert amounts(one.view) == Amounts(2, 130, 10_900, 0)
    one.report(Report(Amounts(2, 130, 10_900, 0)), 1.1)
    assert amounts(one.view) == Amounts(2, 130, 10_900, 0)


def test_the_number_of_received_requests_is_better_than_time() -> None:
    one = book(settle_s=0.05)
    one.report(Report(Amounts(), received=7), 0.0)  # others have sent seven
    one.send(("a", 1), prompt(100, 0.1))
    one.send(("b", 1), prompt(30, 0.2))
    one.report(Report(Amounts(1, 100, 10_000, 0), received=8), 0.9)  # a pass of 0.7 s kept it from receiving b
    assert amounts(one.view) == Amounts(2, 130, 10_900, 0)
    one.report(Report(Amounts(2, 130, 10_900, 0), received=9), 0.95)
    assert amounts(one.view) == Amounts(2, 130, 10_900, 0)


def test_a_request_that_never_arrives_is_forgotten() -> None:
    one = LoadBook(InstanceView(0, "i0"), settle_s=0.05, lost_s=2.0)
    one.report(Report(Amounts(), received=0), 0.0)
    one.send(("lost", 1), prompt(100, 0.1))
    one.report(Report(Amounts(), received=0), 1.0)
    assert one.view.queued_tokens == 100
    one.report(Report(Amounts(), received=0), 2.2)
    assert one.view.queued_tokens == 0


def test_what_ended_after_a_report_is_taken_off() -> None:
    one = book()
    one.send(("a", 1), prompt(100, 0.0))
    one.report(Report(Amounts(1, 100, 10_000, 0)), 1.0)
    one.start(("a", 1), 1.1)
    assert amounts(one.view) == Amounts(running=1, context_tokens=100)
    one.end(("a", 1), 1.2)
    assert amounts(one.view) == Amounts()
    one.report(Report(Amounts()), 1.3)
    assert amounts(one.view) == Amounts()


def test_what_others_send_is_kept() -> None:
    one = book()
    one.send(("a", 1), prompt(100, 0.0))
    one.report(Report(Amounts(3, 400, 60_000, 9, 2, 50)), 1.0)
    one.end(("a", 1), 1.5)
    assert amounts(one.view) == Amounts(2, 300, 50_000, 9, 2, 50)


def test_the_rest_of_a_report() -> None:
    one = book()
    one.report(Report(Amounts(), None, 5, 100, 0.02, 1.7, 0.4), 1.0)
    view = one.view
    assert (view.kv_used_tokens, view.kv_capacity_tokens, view.token_interval_s) == (5, 100, 0.02)
    assert (view.utilisation, view.prefill_age_s) == (1.0, 0.4)
    assert one.is_fresh(1.5, 1.0)
    assert not one.is_fresh(2.5, 1.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "start", "end", "report"]),
        st.integers(0, 5),
        st.integers(1, 900),
        st.integers(0, 300),
        st.floats(0.001, 0.5),
    ),
    max_size=40,
)


class Engine:
    """Hears of each request ``DELAY_S`` after it was sent, and reports what it knows. Six others have sent before."""

    def __init__(self) -> None:
        self.requests: list[Tracked] = []

    def received(self, request: Tracked, now_s: float) -> bool:
        return request.started_s is not None or now_s - request.sent_s >= DELAY_S

    def report(self, now_s: float, *, counts: bool) -> Report:
        total = Amounts()
        for request in self.requests:
            total.count(request, request.phase_at(now_s, received=self.received(request, now_s)))
        received = 6 + sum(self.received(request, now_s) for request in self.requests)
        return Report(total, received if counts else None)

    def truth(self, now_s: float) -> Amounts:
        total = Amounts()
        for request in self.requests:
            total.count(request, request.phase_at(now_s))
        return total


DELAY_S = 0.03


@given(STEPS, st.booleans())
def test_a_corrected_report_is_the_truth(steps: list[tuple[str, int, int, int, float]], counts: bool) -> None:
    """After each report and each event the book says what really is there or on its way."""
    one, engine, now_s = book(settle_s=DELAY_S), Engine(), 0.0
    one.report(engine.report(now_s, counts=counts), now_s)
    live: dict[int, tuple[tuple[str, int], Tracked]] = {}
    for action, slot, new, history, gap_s in steps:
        now_s += gap_s
        key, request = live.get(slot, (("", 0), None))
        if action == "report":
            one.report(engine.report(now_s, counts=counts), now_s)
        elif action == "send" and request is None:
            request = prompt(new, now_s, history=history)
            key = (f"r{len(engine.requests)}", 1)
            live[slot] = (key, request)
            engine.requests.append(request)
            one.send(key, request)
        elif action == "start" and request is not None:
            one.start(key, now_s)
        elif action == "end" and request is not None and engine.received(request, now_s):
            one.end(key, now_s)
            del live[slot]
        assert amounts(one.view) == engine.truth(now_s)
