"""Places of LoRA adapters: who may join the running batch with its KV, and what is left for prefills meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.fleet.stateless.host.adapters import PATIENT_PASSES, AdapterPlaces, split_joining
from pla_sglang.fleet.stateless.scheduler_hooks import after_can_schedule_lora, before_can_schedule_lora

PLACES = 2


def request(adapter: str | None, *, finished: bool = False) -> Any:
    return SimpleNamespace(lora_id=adapter, finished=lambda: finished)


def batch(*adapters: str | None) -> Any:
    decode = SimpleNamespace(is_extend=lambda: False)
    return SimpleNamespace(reqs=[request(adapter) for adapter in adapters], chunked_req=None, forward_mode=decode)


def fits(scheduler: Any, req: Any, used: set[str | None]) -> bool:
    """As the host: an adapter in use may always join, another one where the pool has a place."""
    return req.lora_id in used or len(used | {req.lora_id}) <= PLACES


class Host:
    """A scheduler whose check goes through our hook."""

    def __init__(self, *, enable_lora: bool = True) -> None:
        self.enable_lora, self.chunked_req = enable_lora, None
        self.pla_fleet = SimpleNamespace(adapters=AdapterPlaces(self))

    @property
    def adapters(self) -> AdapterPlaces:
        places: AdapterPlaces = self.pla_fleet.adapters
        return places

    def _can_schedule_lora_req(self, req: Any, used: set[str | None]) -> bool:
        (_, _, beside), _ = before_can_schedule_lora(self, req, used)
        return after_can_schedule_lora(fits(self, req, beside), self, req, beside)

    def prefills(self, adapter: str | None, running: set[str | None]) -> bool:
        return self._can_schedule_lora_req(request(adapter), running)


@pytest.mark.parametrize(
    ("running", "last", "chunk", "wanted", "joins"),
    [
        ((), (), None, "red", True),
        (("red", "blue"), (), None, "red", True),
        (("red", "blue"), (), None, "green", False),
        ((None, "blue"), (), None, "green", False),  # the model alone has a place too
        (("red",), ("blue",), None, "green", False),  # the last pass's will run
        (("red",), (), "blue", "green", False),  # a prompt in chunks, parked or not
        (("red",), (), "red", "green", True),
    ],
)
def test_who_joins(
    running: tuple[str | None, ...], last: tuple[str, ...], chunk: str | None, wanted: str, joins: bool
) -> None:
    host = Host()
    host.chunked_req = None if chunk is None else request(chunk)
    host.adapters.count_used(batch(*running), batch(*last))
    assert host.adapters.take(request(wanted)) is joins


def test_finished_requests_need_no_adapter() -> None:
    host = Host()
    done = SimpleNamespace(reqs=[request("red", finished=True), request("blue")])
    host.adapters.count_used(done, None)
    assert host.adapters.take(request("green"))


def test_each_who_joins_takes_a_place() -> None:
    host = Host()
    host.adapters.count_used(batch("red"), None)
    waiting = [request(adapter) for adapter in ("blue", "green", "blue", "red")]
    joining, rest = split_joining(waiting, 3, host.adapters.take)
    assert [req.lora_id for req in joining] == ["blue", "blue", "red"]
    assert [req.lora_id for req in rest] == ["green"]
    assert split_joining(waiting, 0, lambda req: pytest.fail("asked without a place")) == ([], waiting)


def test_without_adapters_all_join() -> None:
    host = Host(enable_lora=False)
    host.adapters.count_used(batch(*"abcdefg"), None)
    assert host.adapters.take(request("h"))


def test_a_place_that_becomes_free_is_for_who_waits() -> None:
    host, running = Host(), {"red", "blue"}
    host.adapters.count_used(batch(*running), None)
    assert not host.adapters.take(request("green"))
    assert host.prefills("red", running), "an adapter in use needs no place"
    assert not host.prefills("green", running), "nor may a prefill go where who waits could not"
    assert not host.prefills("white", {"red"})
    assert host.prefills("green", {"red"})
    assert running == {"red", "blue"}, "the host's own set"
    host.adapters.count_used(batch("red"), None)
    assert host.adapters.take(request("green"))
    assert host.prefills("white", {"red"}), "nobody waits any more"


def test_who_waits_long_is_not_kept_out_by_adapters_in_use() -> None:
    host = Host()
    for turn in range(PATIENT_PASSES + 2):
        host.adapters.count_used(batch("red", "blue"), None)
        assert not host.adapters.take(request("green"))
        assert host.prefills("red", {"red", "blue"}) is (turn < PATIENT_PASSES), turn
    assert host.prefills("green", {"blue"}), "its own adapter's prefills are no hindrance"
    host.adapters.count_used(batch("blue"), None)
    assert host.adapters.take(request("green"))
    assert host.prefills("blue", {"blue", "green"})
