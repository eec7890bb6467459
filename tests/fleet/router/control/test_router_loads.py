"""Between reports the load tracker says what an instance has to do, whatever the report had counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.loads import FIELDS, load_amounts

from pla_sglang.load.instance_load import InstanceLoad
from pla_sglang.load.tracker import LoadTracker, Phase, TrackedRequest, count_request
from pla_sglang.policy.interface.fleet import InstanceView, LoadAmounts


def amounts(view: InstanceView) -> LoadAmounts:
    return LoadAmounts(**{name: getattr(view, name) for name in FIELDS})


def tracker(settle_s: float = 0.05) -> LoadTracker:
    return LoadTracker(InstanceView(0, "i0"), settle_s=settle_s)


def prompt(new: int, now_s: float, *, history: int = 0, decodes_here: bool = True) -> TrackedRequest:
    return TrackedRequest(new, history, now_s, Phase.QUEUED, decodes_here)


def test_without_reports_the_own_requests_count() -> None:
    load = tracker()
    load.add_request(("a", 1), prompt(100, 0.0, history=20))
    load.add_request(("b", 1), prompt(10, 0.1))
    assert amounts(load.view) == load_amounts(2, 110, 100 * 140 + 100, 20)
    load.start_request(("a", 1), 0.2)
    assert amounts(load.view) == load_amounts(1, 10, 100, 0, 1, 120)
    load.start_request(("a", 1), 0.3)  # told twice
    load.end_request(("a", 1), 0.4)
    load.end_request(("a", 1), 0.5)
    load.end_request(("b", 1), 0.6)
    assert amounts(load.view) == load_amounts()
    assert load.is_idle()


def test_a_prefill_instance_is_done_with_its_prefill() -> None:
    load = tracker()
    load.add_request(("a", 1), prompt(100, 0.0, decodes_here=False))
    load.start_request(("a", 1), 0.2)
    assert amounts(load.view) == load_amounts()
    assert not load.is_idle()  # the KV is still being sent
    load.end_request(("a", 1), 0.3)
    assert load.is_idle()


def test_a_decode_instance_waits_for_the_kv() -> None:
    load = tracker()
    load.add_request(("a", 1), TrackedRequest(120, 0, 0.0, Phase.COMING, True))
    assert amounts(load.view) == load_amounts(waiting_decodes=1, waiting_decode_tokens=120)
    load.start_request(("a", 1), 0.2)
    assert amounts(load.view) == load_amounts(running=1, context_tokens=120)


def named(tokens: int, now_s: float) -> TrackedRequest:
    return TrackedRequest(tokens, 0, now_s, Phase.PREFILLING, True)


def test_a_decode_is_named_before_its_prefill_and_arrives_after_it() -> None:
    load = tracker()
    load.add_request(("a", 1), named(120, 0.0))
    waiting = {"waiting_decodes": 1, "waiting_decode_tokens": 120}
    assert amounts(load.view) == load_amounts(**waiting, prefilling_decode_tokens=120)
    assert (load.view.decode_tokens(), load.view.assigned_decode_tokens()) == (0, 120)
    load.on_load(InstanceLoad(load_amounts(**waiting)), 1.0)  # the instance cannot tell
    assert amounts(load.view) == load_amounts(**waiting, prefilling_decode_tokens=120)
    load.note_prefilled(("a", 1))
    load.note_prefilled(("a", 1))  # told twice
    assert amounts(load.view) == load_amounts(**waiting)
    assert (load.view.decode_tokens(), load.view.assigned_decode_tokens()) == (120, 120)
    load.on_load(InstanceLoad(load_amounts(**waiting)), 1.1)
    assert amounts(load.view) == load_amounts(**waiting)
    load.start_request(("a", 1), 1.2)
    assert amounts(load.view) == load_amounts(running=1, context_tokens=120)


def test_more_is_never_named_than_waits() -> None:
    """An instance that has lost a request no longer counts it, and the router has not heard of that."""
    load = LoadTracker(InstanceView(0, "i0"))
    load.on_load(InstanceLoad(load_amounts(), received=0), 0.0)
    load.add_request(("lost", 1), named(120, 0.1))
    load.on_load(InstanceLoad(load_amounts(), received=1), 0.2)
    assert load.view.decode_tokens() == load.view.prefilling_decode_tokens == 0


def test_decodes_of_another_router_count_as_arriving() -> None:
    load = tracker()
    load.add_request(("a", 1), named(120, 0.0))
    load.on_load(InstanceLoad(load_amounts(waiting_decodes=2, waiting_decode_tokens=150)), 1.0)
    assert (load.view.decode_tokens(), load.view.assigned_decode_tokens()) == (30, 150)


def test_a_prefill_that_a_report_has_left_out_ends_without_a_change() -> None:
    """PD: the prefill instance reports its pass long before the first token comes from the decode instance."""
    load = tracker()
    load.on_load(InstanceLoad(load_amounts(), received=0), 0.0)
    for name, new in (("a", 100), ("b", 30)):
        load.add_request((name, 1), prompt(new, 0.1, decodes_here=False))
    load.on_load(InstanceLoad(load_amounts(1, 30, 900, 0), received=2), 0.9)
    load.add_request(("c", 1), prompt(50, 0.95, decodes_here=False))
    load.end_request(("a", 1), 1.0)
    assert amounts(load.view) == load_amounts(2, 80, 3_400, 0)
    load.end_request(("b", 1), 1.1)
    load.end_request(("c", 1), 1.2)
    assert amounts(load.view) == load_amounts()


def test_a_request_that_never_arrives_is_forgotten() -> None:
    load = LoadTracker(InstanceView(0, "i0"), settle_s=0.05)
    load.on_load(InstanceLoad(load_amounts(), received=0), 0.0)
    load.add_request(("lost", 1), prompt(100, 0.1))
    load.on_load(InstanceLoad(load_amounts(), received=0), 1.0)
    assert load.view.queued_tokens == 100
    load.on_load(InstanceLoad(load_amounts(), received=0), 2.2)
    assert load.view.queued_tokens == 0


def test_what_others_send_is_kept() -> None:
    load = tracker()
    load.add_request(("a", 1), prompt(100, 0.0))
    load.on_load(InstanceLoad(load_amounts(3, 400, 60_000, 9, 2, 50)), 1.0)
    load.end_request(("a", 1), 1.5)
    assert amounts(load.view) == load_amounts(2, 300, 50_000, 9, 2, 50)


def test_the_rest_of_a_report() -> None:
    load = tracker()
    load.on_load(InstanceLoad(load_amounts(), None, 5, 100, 0.02, 1.7, 0.4), 1.0)
    view = load.view
    assert (view.kv_used_tokens, view.kv_capacity_tokens, view.token_interval_s) == (5, 100, 0.02)
    assert (view.utilisation, view.prefill_age_s) == (1.0, 0.4)
    assert load.is_fresh(1.5, 1.0)
    assert not load.is_fresh(2.5, 1.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "name", "prefilled", "start", "end", "report"]),
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
        self.requests: list[TrackedRequest] = []

    def received(self, request: TrackedRequest, now_s: float) -> bool:
        return request.started_s is not None or now_s - request.sent_s >= DELAY_S

    def report_load(self, now_s: float, *, counts: bool) -> InstanceLoad:
        total = load_amounts()
        for request in self.requests:
            phase = request.phase_at(now_s, received=self.received(request, now_s))
            count_request(total, request, Phase.COMING if phase is Phase.PREFILLING else phase)
        received = 6 + sum(self.received(request, now_s) for request in self.requests)
        return InstanceLoad(total, received if counts else None)

    def truth(self, now_s: float) -> LoadAmounts:
        total = load_amounts()
        for request in self.requests:
            count_request(total, request, request.phase_at(now_s))
        return total


DELAY_S = 0.03


@given(STEPS, st.booleans())
def test_a_corrected_report_is_the_truth(steps: list[tuple[str, int, int, int, float]], counts: bool) -> None:
    """After each report and each event the tracker says what really is there or on its way."""
    load, engine, now_s = tracker(settle_s=DELAY_S), Engine(), 0.0
    load.on_load(engine.report_load(now_s, counts=counts), now_s)
    live: dict[int, tuple[tuple[str, int], TrackedRequest]] = {}
    for action, slot, new, history, gap_s in steps:
        now_s += gap_s
        key, request = live.get(slot, (("", 0), None))
        if action == "report":
            load.on_load(engine.report_load(now_s, counts=counts), now_s)
        elif action in ("send", "name") and request is None:
            request = prompt(new, now_s, history=history) if action == "send" else named(new, now_s)
            key = (f"r{len(engine.requests)}", 1)
            live[slot] = (key, request)
            engine.requests.append(request)
            load.add_request(key, request)
        elif action == "prefilled":
            load.note_prefilled(key)
        elif action == "start" and request is not None:
            load.start_request(key, now_s)
        elif action == "end" and request is not None and engine.received(request, now_s):
            load.end_request(key, now_s)
            del live[slot]
        assert amounts(load.view) == engine.truth(now_s)
        phases = [(one, one.phase_at(now_s)) for _, one in live.values() if one is not None]
        decoding = sum(one.new_tokens for one, phase in phases if phase in (Phase.COMING, Phase.RUNNING))
        named_tokens = sum(one.new_tokens for one, phase in phases if phase is Phase.PREFILLING)
        decoding += sum(one.history_tokens for one, phase in phases if phase is Phase.RUNNING)
        assert load.view.decode_tokens() == decoding
        assert load.view.assigned_decode_tokens() == decoding + named_tokens
