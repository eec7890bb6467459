"""What runs in the data-parallel controller process, against a fake of SGLang's controller and real sockets.

That SGLang's controller has these fields, and uses them so, is checked by the seams' tests and end to end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pla_sglang.common.errors import HostMismatchError
from pla_sglang.load.report import Backlog, Report
from pla_sglang.load.sockets import Pusher
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import control
from pla_sglang.plugin.engine.hooks.dp_controller import Service, Turns
from pla_sglang.plugin.engine.hooks.dp_entry import _ReadyPipe
from pla_sglang.plugin.engine.pools import query


class FakeController:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.server_args = SimpleNamespace(
            dp_size=2,
            chunked_prefill_size=2048,
            max_prefill_tokens=16_384,
            device="cpu",
            enable_metrics=False,
            served_model_name="m",
        )
        self.recv_from_tokenizer = context.socket(zmq.PULL)
        self.recv_from_tokenizer.bind(address)
        self.forwarded: list[Any] = []

    def send_control_message(self, message: Any) -> None:
        self.forwarded.append(message)

    def maybe_external_dp_rank_routing(self, req: Any) -> bool:
        return req.routed_dp_rank is not None


class Recording(Service):
    def __init__(self, controller: Any, config: PlaConfig) -> None:
        self.sent: list[tuple[int, Any]] = []
        super().__init__(controller, config)

    def _send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def close(self) -> None:
        self._reports.close()
        self._answers.close()
        self.controller.recv_from_tokenizer.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Recording]:
    config = PlaConfig(
        prefill_disagg="spatial", boundary_tokens=256, slo_ttft_ms=60_000.0, controller_folder=str(tmp_path)
    )
    made = Recording(FakeController(zmq.Context.instance(), f"ipc://{tmp_path}/front"), config)
    yield made
    made.close()


def generation(tokens: int, rank: int | None = None, **params: Any) -> Any:
    return SimpleNamespace(
        rid=f"r{tokens}",
        input_ids=[1] * tokens,
        lora_id=None,
        routed_dp_rank=rank,
        sampling_params=SimpleNamespace(custom_params=params or None),
    )


def knobs(**values: float) -> Any:
    return SimpleNamespace(server_args={f"pla.{name}": value for name, value in values.items()})


def report(rank: int, sequence: int = 1, **fields: Any) -> Report:
    return Report(instance="a", dp_rank=rank, dp_size=2, sequence=sequence, **fields)


def push(service: Recording, *reports: Report) -> None:
    """Send until the service has taken all of them."""
    pusher = Pusher(f"ipc://{service.pools.config.controller_folder}/reports")
    try:
        for one in reports:
            while not pusher.send(one):
                service.turn()
        end_s = time.monotonic() + 10
        wanted = {(one.dp_rank, one.sequence) for one in reports}
        while wanted and time.monotonic() < end_s:
            service.turn()
            seen = [report for load in service.pools.loads for report in load.reports.values()]
            wanted = {key for key in wanted if all(r.dp_rank != key[0] or r.sequence < key[1] for r in seen)}
        assert not wanted
    finally:
        pusher.close()


def test_dispatch_by_length(service: Recording) -> None:
    short, long = generation(10), generation(3000)
    service.dispatch(short)
    service.dispatch(long)
    assert service.sent == [(0, short), (1, long)]


def test_a_request_without_token_ids_is_short(service: Recording) -> None:
    service.dispatch(SimpleNamespace(rid="e", input_ids=None, lora_id=None, routed_dp_rank=None))
    assert service.sent[0][0] == 0


def test_a_rank_that_the_request_names_is_respected(service: Recording) -> None:
    service.dispatch(generation(3000, rank=0))
    assert service.sent == [], "SGLang itself has sent it"
    assert (service.pools.external, service.pools.loads[0].open_requests()) == (1, 1)


def test_a_target_of_its_own_decides_about_spilling(service: Recording) -> None:
    push(service, report(0, backlog=Backlog(1, 100_000, 0, 0)), report(1))
    service.dispatch(generation(10))
    service.dispatch(generation(20, slo_ttft_ms=500))
    assert [rank for rank, _ in service.sent] == [0, 1]


def test_a_role_for_one_rank_reaches_pools_and_ranks(service: Recording) -> None:
    request = knobs(role=2, dp_rank=0)
    service.on_internal_state(request)
    assert service.pools.roles == ["long", "long"]
    assert service.controller.forwarded == [request]
    assert request.server_args == {"pla.role": 2, "pla.dp_rank": 0}
    assert service.sent == [], "the ranks hear of it by the request itself"


def test_nobody_but_the_controller_may_ask_a_rank_to_be_quiet(service: Recording) -> None:
    """A rank that does not answer would keep the front waiting for ever."""
    request = knobs(role=0, quiet=1)
    service.on_internal_state(request)
    assert control.QUIET not in request.server_args


def test_knobs_of_the_controller_change_live(service: Recording) -> None:
    service.on_internal_state(knobs(pressure=1, pressure_cool_down_ms=250, pressure_hysteresis=0.25))
    config = service.pools.config
    assert (config.pressure, config.pressure_cool_down_ms, config.role) == ("off", 250, "mixed")
    assert service.pools.describe_state(0.0)["knobs"]["tau"] == 0.25
    service.on_internal_state(SimpleNamespace(server_args={"pp_max_micro_batch_size": 2}))
    service.on_internal_state(knobs(pressure=7))
    assert service.pools.config == config, "what is refused changes nothing"
    assert len(service.controller.forwarded) == 3


def test_a_move_is_told_to_its_rank_alone_and_quietly(service: Recording) -> None:
    service.pools.announce_roles()
    assert [rank for rank, _ in service.sent] == [0, 1]
    assert service.sent[1][1].server_args == {"pla.role": 2, "pla.quiet": 1}


def test_a_flush_empties_the_prefix_models(service: Recording) -> None:
    service.dispatch(generation(3000))
    assert service.pools._prefixes.count_blocks() > 0
    service.on_flush("flush")
    assert service.pools._prefixes.count_blocks() == 0
    assert service.controller.forwarded == ["flush"]


def test_state_is_answered_between_two_turns(service: Recording) -> None:
    answers: list[dict[str, Any]] = []

    def client() -> None:
        answers.append(asyncio.run(query.ask(f"ipc://{service.pools.config.controller_folder}/state")))

    thread = threading.Thread(target=client)
    thread.start()
    end_s = time.monotonic() + 20
    while not answers and time.monotonic() < end_s:
        service.turn()
    thread.join(10)
    assert [one["role"] for one in answers[0]["ranks"]] == ["short", "long"]
    assert answers[0]["malformed_reports"] == 0


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "TIMEOUT_MS", 20)
    assert "has not answered" in asyncio.run(query.ask(f"ipc://{tmp_path}/nobody"))["error"]


def test_the_loop_waits_for_work_instead_of_spinning(service: Recording) -> None:
    done: list[str] = []
    turns = Turns(SimpleNamespace(feed=lambda: done.append("fed"), disable=lambda: "host's"), service)
    service._poller = SimpleNamespace(poll=lambda wait_ms: done.append(f"waited {wait_ms} ms"))
    turns.feed()
    assert done == ["fed", "waited 10 ms"]
    assert turns.disable() == "host's"


def test_a_message_ends_the_wait(service: Recording) -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.PUSH) as front:
        front.connect(f"ipc://{service.pools.config.controller_folder}/front")
        front.send(b"request")
        for _ in range(2):  # the host reads the message afterwards
            assert service._poller.poll(20_000) == [(service.controller.recv_from_tokenizer, zmq.POLLIN)]
            service.turn()


def test_ready_once_every_rank_reports(service: Recording) -> None:
    push(service, report(0))
    with pytest.raises(HostMismatchError, match="data-parallel rank 1 does not report"):
        service.await_reports(0.02)
    push(service, report(1))
    service.await_reports(5.0)


def test_the_controller_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "pla_sglang.plugin.engine.hooks.dp_controller.ready_info", lambda patience_s: {"hooks": "4 seams"}
    )
    _ReadyPipe(SimpleNamespace(send=sent.append)).send({"status": "ready"})
    assert sent == [{"status": "ready", "pla": {"hooks": "4 seams"}}]
