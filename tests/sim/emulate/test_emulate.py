"""The emulated device: its time line, its log of errors, the shape of a batch, and what the flag adds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.platform import value_of
from pla_sglang.profiles import ProfileError, load_profile
from pla_sglang.sim.emulate import device as device_module
from pla_sglang.sim.emulate import hooks
from pla_sglang.sim.emulate.arguments import check, with_emulation
from pla_sglang.sim.emulate.batch import StepShape, shape_of
from pla_sglang.sim.emulate.device import EmulatedDevice, KvLink, ResultReady, build
from pla_sglang.sim.emulate.steplog import StepLog
from pla_sglang.sim.emulate.timeline import Span, Timeline

PROFILE = "h100-llama3.1-8b-tp1"


def test_work_queues_behind_what_was_launched_before() -> None:
    line = Timeline()
    assert line.launch(2.0, now_s=10.0) == Span(10.0, 10.0, 12.0, 0.0)
    assert line.launch(1.0, now_s=11.0) == Span(11.0, 12.0, 13.0, 0.0)
    assert line.busy_s == 3.0
    assert line.overhead_share == 0.0


def test_a_gap_is_the_hosts_unless_there_was_no_work() -> None:
    line = Timeline()
    line.launch(2.0, now_s=0.0)
    assert line.launch(2.0, now_s=3.0).gap_s == 1.0
    line.rest()
    assert line.launch(1.0, now_s=9.0).gap_s == 0.0
    assert (line.busy_s, line.gap_s) == (5.0, 1.0)
    assert line.overhead_share == pytest.approx(1 / 6)


def test_a_pass_may_cost_more_than_its_tokens() -> None:
    """Its host is not to blame for that."""
    line = Timeline()
    line.launch(2.0, now_s=0.0)
    assert line.launch(2.0, now_s=1.0, before_s=0.5) == Span(1.0, 2.5, 4.5, 0.0, 0.5)
    assert (line.busy_s, line.between_s, line.gap_s, line.overhead_share) == (4.0, 0.5, 0.0, 0.0)
    assert line.launch(1.0, now_s=5.0, before_s=0.5).gap_s == 0.5


def test_a_pass_on_a_device_whose_passes_cost_more_than_their_tokens() -> None:
    profile = load_profile("h100-qwen2.5-7b-tp1")
    device, prefill = EmulatedDevice(profile, time_scale=2.0, prefill_graph=True), StepShape(new_tokens=500, requests=1)
    span = device.launch(prefill, 10.0)
    assert (span.before_s, span.ready_s) == pytest.approx((2 * profile.pass_s, 10.0 + 2 * profile.prefill_s(500, 0)))
    assert device.launch(StepShape(batch=1, context_tokens=10), 11.0).before_s == 0.0
    state = device.state()
    assert (state["pass_ms"], state["pass_gap_s"]) == (profile.pass_s * 1e3, span.before_s)


def test_the_host_is_busy_with_a_launch_where_there_is_no_graph() -> None:
    profile, short = load_profile(PROFILE), StepShape(new_tokens=50, requests=1)
    assert (
        EmulatedDevice(profile, time_scale=2.0, prefill_graph=False).host_s(short) == 2 * profile.launch_floor.eager_s
    )
    assert EmulatedDevice(profile, time_scale=2.0, prefill_graph=True).host_s(short) == 0.0
    assert EmulatedDevice(profile, time_scale=2.0, prefill_graph=False).host_s(StepShape(batch=4)) == 0.0


def test_the_first_launch_has_no_gap_and_an_unused_line_no_share() -> None:
    assert Timeline().overhead_share == 0.0
    assert Timeline().launch(1.0, now_s=5.0).gap_s == 0.0


def test_a_broken_device_fails_at_the_next_pass() -> None:
    device = EmulatedDevice(load_profile(PROFILE), time_scale=1.0, prefill_graph=False)
    device.launch(StepShape(batch=1), 1.0)
    device.break_down()
    with pytest.raises(RuntimeError, match="has failed"):
        device.launch(StepShape(batch=1), 2.0)


def test_step_errors_run_from_result_to_result() -> None:
    log = StepLog()
    log.observe(Span(0.0, 0.0, 1.0, 0.0), seen_s=1.1)  # from its launch: 10 % late
    log.observe(Span(0.5, 1.0, 2.0, 0.0), seen_s=2.0)  # 0.9 s after the result before
    log.observe(Span(5.0, 5.0, 6.0, 0.0), seen_s=6.5)  # after a pause: from its launch again
    assert log.quantiles((0.0, 0.5, 1.0)) == pytest.approx([0.1, 0.1, 0.5])
    assert log.steps == 3
    assert StepLog().quantiles((0.5, 0.99)) == [None, None]


class Mode:
    """Stands in for the host's ForwardMode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name in ("extend", "mixed")

    def is_mixed(self) -> bool:
        return self.name == "mixed"


def batch(mode: str, *, extend: list[int], prefix: list[int], seq: list[int], decodes: int = 0) -> Any:
    return SimpleNamespace(
        forward_mode=Mode(mode),
        reqs=[object()] * len(seq),
        extend_lens=extend,
        prefix_lens=prefix,
        seq_lens_cpu=torch.tensor(seq),
        decoding_reqs=[object()] * decodes or None,
    )


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (batch("decode", extend=[], prefix=[], seq=[5, 7]), StepShape(batch=2, context_tokens=12)),
        (
            batch("extend", extend=[10, 4], prefix=[0, 100], seq=[10, 104]),
            StepShape(new_tokens=14, attention=100 + 4 * 204, history_tokens=100, requests=2),
        ),
        (
            batch("mixed", extend=[10, 1, 1], prefix=[0, 30, 40], seq=[10, 31, 41], decodes=2),
            StepShape(new_tokens=10, attention=100, requests=1, batch=2, context_tokens=72),
        ),
        (batch("idle", extend=[], prefix=[], seq=[]), StepShape()),
    ],
    ids=["decode", "extend", "mixed", "idle"],
)
def test_shape_of_a_batch(given: Any, shape: StepShape) -> None:
    assert shape_of(given) == shape


def test_cost_follows_the_profile_and_the_scale() -> None:
    profile = load_profile(PROFILE)
    device = EmulatedDevice(profile, time_scale=4.0, prefill_graph=True)
    eager = EmulatedDevice(profile, time_scale=4.0, prefill_graph=False)
    assert device.cost_s(StepShape(batch=8, context_tokens=8000)) == 4 * profile.decode_s(8, 8000)
    short = StepShape(new_tokens=50, attention=2500, requests=1)
    assert device.cost_s(short) == 4 * profile.prefill_s(50, 2500)
    assert eager.cost_s(short) == 4 * profile.launch_floor.eager_s
    # decodes are captured as graphs in either case
    assert eager.cost_s(StepShape(batch=1, context_tokens=10)) == device.cost_s(StepShape(batch=1, context_tokens=10))
    assert device.cost_s(StepShape()) == 0.0


def test_a_result_is_waited_for_and_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, naps_s = 100.0, []

    def sleep(nap_s: float) -> None:
        nonlocal now_s
        naps_s.append(nap_s)
        now_s += nap_s + 0.001

    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=lambda: now_s, sleep=sleep))
    device = EmulatedDevice(load_profile("linear"), time_scale=1.0, prefill_graph=True)
    span = device.launch(StepShape(new_tokens=10, attention=100, requests=1), now_s)
    ready = ResultReady(span, device.log)
    assert not ready.query()
    ready.record()
    ready.synchronize()
    ready.synchronize()
    assert ready.query()
    assert naps_s == [pytest.approx(span.ready_s - 100.0)]
    assert naps_s[0] >= 0.030
    assert device.log.steps == 1
    assert device.state()["steps"] == 1


@pytest.mark.parametrize(("fully_idle", "waits_ms"), [(True, 50), (False, 2)])
def test_an_idle_engine_rests_until_a_message_comes(
    monkeypatch: pytest.MonkeyPatch, fully_idle: bool, waits_ms: int
) -> None:
    """Paused requests and KV transfers send no message, so the rest is half a millisecond of device time with them."""
    inbox, outside = zmq.Context.instance().socket(zmq.PULL), zmq.Context.instance().socket(zmq.PUSH)
    outside.connect(f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}")
    waited_ms: list[int] = []
    host = SimpleNamespace(
        ipc_channels=SimpleNamespace(recv_from_tokenizer=inbox, recv_from_rpc=None), is_fully_idle=lambda: fully_idle
    )
    monkeypatch.setattr(hooks, "_device", EmulatedDevice(load_profile("linear"), time_scale=4.0, prefill_graph=True))
    monkeypatch.setattr(hooks, "_poller", None)
    outside.send(b"request")
    try:
        assert hooks._inbox(host).poll(5000) == [(inbox, zmq.POLLIN)]  # the message ends the rest
        monkeypatch.setattr(zmq.Poller, "poll", lambda poller, timeout: waited_ms.append(timeout))
        hooks.after_on_idle(None, host)
        assert waited_ms == [waits_ms]
    finally:
        inbox.close(0)
        outside.close(0)


def test_a_rank_without_an_inbox_takes_short_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    naps_s: list[float] = []
    host = SimpleNamespace(
        ipc_channels=SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None), is_fully_idle=lambda: True
    )
    monkeypatch.setattr(hooks, "_device", EmulatedDevice(load_profile("linear"), time_scale=4.0, prefill_graph=True))
    monkeypatch.setattr(hooks, "_poller", None)
    monkeypatch.setattr(hooks.time, "sleep", naps_s.append)
    hooks.after_on_idle(None, host)
    assert naps_s == [pytest.approx(0.002)]
    hooks.device().break_down()
    with pytest.raises(RuntimeError, match="has failed"):
        hooks.after_on_idle(None, host)


def test_transfers_share_a_link() -> None:
    link = KvLink(bytes_per_token=1000, gbps=8.0, time_scale=2.0)  # 2 us a token
    assert link.done_s(1000, now_s=1.0) == pytest.approx(1.002)
    assert link.done_s(1000, now_s=1.001) == pytest.approx(1.004)
    assert link.done_s(0, now_s=9.0) == 9.0


def test_the_flag_adds_what_an_emulated_engine_needs() -> None:
    given = ["--pla-emulate", PROFILE, "--port", "1"]
    added = with_emulation(given)
    assert added[-4:] == given
    assert value_of(added, "--device") == "cpu"
    assert value_of(added, "--max-total-tokens") == str(load_profile(PROFILE).kv_capacity_tokens)
    assert (value_of(added, "--model-path") or "").endswith("chain/model")


def test_what_the_user_says_stays() -> None:
    given = [f"--pla-emulate={PROFILE}", "--model=mine", "--max-total-tokens=5", "--chunked-prefill-size", "7"]
    added = with_emulation(given)
    assert value_of(added, "--model-path") is None
    assert value_of(added, "--max-total-tokens") == "5"
    assert value_of(added, "--chunked-prefill-size") == "7"


def test_without_the_flag_nothing_changes() -> None:
    assert with_emulation(["--port", "1"]) == ["--port", "1"]


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=f"unknown profile 'gpu9'; known: .*{PROFILE}"):
        with_emulation(["--pla-emulate", "gpu9"])
    with pytest.raises(ProfileError, match="unknown profile"):
        build(PlaConfig(emulate="gpu9"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"device": "cuda"}, "needs --device cpu, got 'cuda'"),
        ({"device": "cpu", "speculative_algorithm": "EAGLE"}, "cannot be combined with --speculative-algorithm"),
        ({"device": "cpu", "enable_pdmux": True}, "cannot be combined with --enable-pdmux"),
    ],
)
def test_combinations_that_cannot_work(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(SimpleNamespace(**args), PlaConfig(emulate=PROFILE))
    check(SimpleNamespace(**args), PlaConfig())


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"time_scale": 2.0}, "need --pla-emulate PROFILE"),
        ({"emulate_kv_failures": 0.1}, "need --pla-emulate PROFILE"),
        ({"emulate": PROFILE, "emulate_kv_failures": 1.5}, "--pla-emulate-kv-failures 1.5 is out of range"),
        ({"emulate": PROFILE, "time_scale": 0}, "--pla-time-scale 0 is out of range"),
        ({"emulate": PROFILE, "time_scale": float("nan")}, "--pla-time-scale nan is out of range"),
        ({"emulate": PROFILE, "emulate_kv_gbps": -1}, "--pla-emulate-kv-gbps -1 is out of range"),
        ({"emulate": PROFILE, "emulate_launch": "fast"}, "--pla-emulate-launch 'fast' is not known"),
    ],
)
def test_bad_knobs_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlaConfig(**knobs)
