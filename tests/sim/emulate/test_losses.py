"""KV transfers that fail on purpose."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base import KVPoll

from pla_sglang.plugin import config as pla_config
from pla_sglang.sim.emulate import hooks
from pla_sglang.sim.emulate.losses import FailingEnd, lost_at

ROOMS = random.Random(7).sample(range(1 << 62), 20_000)


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pla_config.PlaConfig(emulate="linear", emulate_kv_failures=0.25)
    monkeypatch.setattr(pla_config, "current", lambda: knobs)
    monkeypatch.setattr(hooks, "_link", None)


def room_of(end: FailingEnd | None) -> int:
    return next(room for room in range(1000) if lost_at(room, 0.25) is end)


def party(room: int) -> Any:
    """A sender or a receiver, as far as the hooks know it."""
    told: dict[int, str] = {}
    manager = SimpleNamespace(record_failure=told.__setitem__)
    return SimpleNamespace(bootstrap_room=room, kv_mgr=manager, conclude_state=None, told=told)


def test_the_share_is_kept_at_both_ends() -> None:
    found = [lost_at(room, 0.05) for room in ROOMS]
    for end in FailingEnd:
        assert found.count(end) / len(ROOMS) == pytest.approx(0.025, rel=0.2)


@pytest.mark.parametrize(("share", "lost"), [(0.0, 0), (1.0, len(ROOMS))])
def test_none_and_all(share: float, lost: int) -> None:
    assert sum(lost_at(room, share) is not None for room in ROOMS) == lost


def test_a_loss_at_decode_fails_where_it_would_succeed(lossy: None) -> None:
    receiver = party(room_of(FailingEnd.DECODE))
    for status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring):
        assert hooks.around_receiver_poll(lambda _, status=status: status, receiver) == status
    assert hooks.around_receiver_poll(lambda _: KVPoll.Success, receiver) == KVPoll.Failed
    assert receiver.conclude_state == KVPoll.Failed
    assert "--pla-emulate-kv-failures" in receiver.told[receiver.bootstrap_room]


def test_a_loss_at_prefill_fails_once_both_ends_are_known(lossy: None) -> None:
    sender = party(room_of(FailingEnd.PREFILL))
    assert hooks.around_sender_poll(lambda _: KVPoll.Bootstrapping, sender) == KVPoll.Bootstrapping
    assert not sender.told
    assert hooks.around_sender_poll(lambda _: KVPoll.WaitingForInput, sender) == KVPoll.Failed
    assert "--pla-emulate-kv-failures" in sender.told[sender.bootstrap_room]


@pytest.mark.parametrize("end", [FailingEnd.PREFILL, None])
def test_other_transfers_succeed_at_decode(lossy: None, end: FailingEnd | None) -> None:
    assert hooks.around_receiver_poll(lambda _: KVPoll.Success, party(room_of(end))) == KVPoll.Success


@pytest.mark.parametrize("end", [FailingEnd.DECODE, None])
def test_other_transfers_succeed_at_prefill(lossy: None, end: FailingEnd | None) -> None:
    assert hooks.around_sender_poll(lambda _: KVPoll.Success, party(room_of(end))) == KVPoll.Success
