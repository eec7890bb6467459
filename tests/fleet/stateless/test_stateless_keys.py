"""Who may send legs and tags to a stateless instance: the holders of the keys that it was told."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.reserved import ROUTER_KEY_HEADER, make_router_key
from pla_sglang.fleet.stateless.requests.http_frontend import HttpFrontend, RefusedLegError
from pla_sglang.fleet.stateless.requests.router_keys import (
    KEEP_S,
    MAX_KEYS,
    REST_S,
    KeysFullError,
    RouterKeys,
    find_reserved,
)

KEY, OTHER = "k" * 32, "o" * 32
LEG = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 1}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def request_with(key: str | None) -> Any:
    return SimpleNamespace(headers={} if key is None else {ROUTER_KEY_HEADER: key})


def asked(**fields: Any) -> Any:
    """A request as the host has read it."""
    usual = dict.fromkeys(LEG) | {"sampling_params": {}, "stream": False}
    return SimpleNamespace(**{**usual, **fields})


@pytest.fixture
def front() -> HttpFrontend:
    return HttpFrontend(SimpleNamespace(host="127.0.0.1", nnodes=1, disaggregation_bootstrap_port=8998))


def test_without_a_told_key_legs_come_from_anybody(front: HttpFrontend) -> None:
    front.take_peers({"peers": []})
    for request in (None, request_with(None), request_with("any")):
        front.check_request(asked(**LEG), request)
        front.check_request(asked(sampling_params={"custom_params": {"pla_tokens": [7]}}), request)


RESERVED = [
    (LEG, "bootstrap_host"),
    ({"bootstrap_room": 3}, "bootstrap_room"),
    ({"bootstrap_pair_key": "k"}, "bootstrap_pair_key"),
    ({"bootstrap_pair_key": [None, "k"]}, "bootstrap_pair_key"),
    ({"bootstrap_host": [None, "127.0.0.1"]}, "bootstrap_host"),
    ({"sampling_params": {"custom_params": {"pla_tokens": [1]}}}, "custom_params.pla_tokens"),
    ({"sampling_params": [{}, {"custom_params": {"a": 1, "pla_tokens": [1]}}]}, "custom_params.pla_tokens"),
]


@pytest.mark.parametrize(("fields", "name"), RESERVED)
@pytest.mark.parametrize("request_", [None, request_with(None), request_with(""), request_with(KEY[:-1])])
def test_with_a_told_key_only_its_holder_may_say_them(
    front: HttpFrontend, fields: dict[str, Any], name: str, request_: Any
) -> None:
    told = front.take_peers({"peers": [], "router_key": KEY})
    assert KEY not in repr(told), "schedulers need no key"
    with pytest.raises(RefusedLegError) as refused:
        front.check_request(asked(**fields), request_)
    assert (refused.value.status_code, str(refused.value)) == (400, f"{name} is set by the router and may not be sent")
    with pytest.raises(ValueError, match="set by the router"):  # so that the host makes an event with the status of it
        front.check_request(asked(**fields, stream=True), request_)
    assert not front.is_from_router(request_)


def test_the_holder_of_the_key_is_let_in(front: HttpFrontend) -> None:
    front.take_peers({"peers": [], "router_key": KEY})
    assert front.is_from_router(request_with(KEY))
    front.check_request(asked(**LEG), request_with(KEY))
    with pytest.raises(RefusedLegError, match="neither this instance's own"):  # the other rules stay
        front.check_request(asked(**LEG | {"bootstrap_port": 1}), request_with(KEY))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bootstrap_host": [None, None], "bootstrap_port": [None, None], "bootstrap_room": [None, None]},
        {"sampling_params": None},
        {"sampling_params": {"custom_params": {"slo_ttft_ms": 100, "pla_slo_ttft_ms": 100}}},
        {"sampling_params": [{"custom_params": None}]},
    ],
)
def test_what_clients_say_needs_no_key(front: HttpFrontend, fields: dict[str, Any]) -> None:
    front.take_peers({"peers": [], "router_key": KEY})
    assert find_reserved(asked(**fields)) is None
    front.check_request(asked(**fields), request_with(None))


def test_a_request_without_such_fields_needs_no_key(front: HttpFrontend) -> None:
    """Embeddings have none of them."""
    front.take_peers({"peers": [], "router_key": KEY})
    front.check_request(SimpleNamespace(), request_with(None))


def test_two_routers_and_one_that_was_started_again() -> None:
    clock = Clock()
    keys = RouterKeys(clock)
    assert keys.admits(None)
    keys.add_key(KEY)
    keys.add_key(OTHER)
    assert [keys.admits(key) for key in (KEY, OTHER, None)] == [True, True, False]
    clock.now_s += KEEP_S / 2
    keys.add_key(OTHER)  # the other one is gone
    assert keys.admits(KEY)
    clock.now_s += KEEP_S / 2
    assert [keys.admits(key) for key in (KEY, OTHER)] == [False, True]
    clock.now_s += 10 * KEEP_S  # nobody is there any more: still no other may
    assert [keys.admits(key) for key in (None, KEY, OTHER)] == [False, False, True]


def full_keys(clock: Clock) -> tuple[RouterKeys, list[str]]:
    """As many as are kept, each told a second after the one before."""
    keys, made = RouterKeys(clock), [make_router_key() for _ in range(MAX_KEYS)]
    for key in made:
        clock.now_s += 1
        keys.add_key(key)
    return keys, made


@pytest.mark.parametrize(
    ("after_s", "shown", "lost"),
    [
        (0.0, (), None),
        (REST_S - MAX_KEYS - 1, (), None),
        (REST_S, (), 0),  # the one that was told first
        (REST_S, (0,), 1),  # it is at work, also where it was not told again
        (REST_S, range(MAX_KEYS), None),
        (KEEP_S + 1, (), 0),  # some have lapsed
    ],
)
def test_no_key_at_work_makes_room_for_another(after_s: float, shown: Sequence[int], lost: int | None) -> None:
    clock = Clock()
    keys, made = full_keys(clock)
    clock.now_s += after_s
    for index in shown:
        assert keys.admits(made[index])
    if lost is None:
        with pytest.raises(KeysFullError, match="16 routers"):
            keys.add_key(KEY)
        assert not keys.admits(KEY)
        assert all(keys.admits(key) for key in made), "nothing has changed"
        keys.add_key(made[3])  # who is known is never refused
    else:
        keys.add_key(KEY)
        assert (keys.admits(KEY), keys.admits(made[lost])) == (True, False)


def test_made_up_keys_do_not_keep_a_router_out_for_long() -> None:
    """Somebody tells other keys whenever he can; a router that was started again gets in, one at work stays."""
    clock = Clock()
    keys = RouterKeys(clock)
    keys.add_key(KEY)
    for second in range(600):
        clock.now_s += 1
        if second % 10 == 0:
            keys.add_key(KEY)
        with contextlib.suppress(KeysFullError):
            keys.add_key(make_router_key())
        assert keys.admits(KEY)
    clock.now_s += REST_S
    keys.add_key(OTHER)
    assert keys.admits(OTHER)


def test_a_router_for_whom_there_is_no_room_changes_nothing(front: HttpFrontend) -> None:
    for _ in range(MAX_KEYS):
        front.take_peers({"peers": [], "router_key": make_router_key()})
    with pytest.raises(KeysFullError):
        front.take_peers({"peers": [{"name": "b", "host": "10.0.0.2", "bootstrap_port": 9001}], "router_key": KEY})
    assert front.book.to_dict() == {}


@pytest.mark.parametrize("key", ["", "short", "x" * 129, "with blanks " * 3, "k\u00e9" * 16, 7, None, ["k" * 32]])
def test_a_key_that_is_none_is_refused_and_not_shown(front: HttpFrontend, key: Any) -> None:
    peer = {"name": "b", "host": "10.0.0.2", "bootstrap_port": 9001}
    with pytest.raises(ConfigError, match="router_key is not valid; allowed: 16 to 128 visible ASCII") as refused:
        front.take_peers({"peers": [peer], "router_key": key})
    assert not isinstance(key, str) or not key or key not in str(refused.value)
    assert front.book.to_dict() == {}, "nothing of the list was taken"
    assert front.is_from_router(None)


def test_a_bad_list_leaves_the_keys_as_they_were(front: HttpFrontend) -> None:
    with pytest.raises(ConfigError, match="peers"):
        front.take_peers({"peers": 3, "router_key": KEY})
    assert front.is_from_router(None)


def test_the_front_forgets_peers_that_are_told_no_more(front: HttpFrontend) -> None:
    front.take_peers({"peers": [{"name": "b", "host": "10.0.0.2", "bootstrap_port": 9001}]})
    front.take_peers({"peers": []})
    assert front.book.at("10.0.0.2", 9001) is None
