"""Stand-ins for the engines and routers of live benches.

The flags, the cluster's description, the router's command, the rows of its workers and the devices' figures are made
by the real code; what an answer takes is decided by each test.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang, Script

from bench.harness import live_fleet, servers
from bench.harness.replay import Planned, Record
from pla_sglang import launch_cluster
from pla_sglang.fleet.cluster.instance import Instance
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.cluster.spec import instances
from pla_sglang.launch_router import read_config as read_router_config
from pla_sglang.profiles import load_profile
from pla_sglang.sim import chain
from pla_sglang.sim.emulate.batch import StepShape
from pla_sglang.sim.emulate.device import EmulatedDevice
from support.token_streams import DONE, Event, dump

# Device time of the first and the last token of each request, since the start of the run.
AnswerTimes = Callable[["LiveStandIns", Sequence[Planned]], Sequence[tuple[float, float]]]
DEFAULT_PROFILE = "h100-llama3.1-8b-tp1"


def make_device(time_scale: float, profile: str = DEFAULT_PROFILE) -> EmulatedDevice:
    return EmulatedDevice(load_profile(profile), time_scale=time_scale, prefill_graph=True)


def work_a_pass(device: EmulatedDevice, gap_share: float) -> None:
    """A pass on the device, whose host was in the way for this share of the time with work."""
    shape = StepShape(new_tokens=100, attention=10_000.0, requests=1)
    span = device.launch(shape, device.timeline.busy_s)
    device.log.observe(span, span.ready_s)
    device.timeline.gap_s += device.cost_s(shape) * gap_share / (1 - gap_share)


def after_arrival(planned: Sequence[Planned], time_scale: float, *taken_s: float) -> list[tuple[float, float]]:
    """``AnswerTimes`` of requests that all take so long to the first and to the last token."""
    first_s, last_s = taken_s
    return [(request.at_s / time_scale + first_s, request.at_s / time_scale + last_s) for request in planned]


class LiveStandIns:
    """Put in the place of real processes by ``install``.

    Attributes:
        gap_share: of the time with work in which the hosts are in the way.
        wrong, late_s: tokens that each answer lacks; device time by which it is later than ``answer_times`` says.
        flips, prefixes: what routers say in /pla/state.
        clusters, engines: flags, and names of the engines, of each start.
        routed: each router, and the names and kinds of the engines behind it.
    """

    def __init__(self, answer_times: AnswerTimes, *, time_scale: float, profile: str = DEFAULT_PROFILE) -> None:
        self.gap_share, self.wrong, self.late_s, self.flips = 0.02, 0, 0.0, 3
        self.prefixes: dict[str, dict[str, int]] = {}
        self.clusters: list[list[str]] = []
        self.engines: list[list[str]] = []
        self.routed: list[tuple[servers.Router, dict[str, str]]] = []
        self._answer_times, self._time_scale, self._profile = answer_times, time_scale, profile
        self._devices: dict[str, EmulatedDevice] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> LiveStandIns:
        monkeypatch.setattr(servers, "running_cluster", self.run_cluster)
        monkeypatch.setattr(servers, "running_router", self.run_router)
        monkeypatch.setattr(servers, "fetch", self.fetch)
        monkeypatch.setattr(servers, "flush_cache", lambda url: None)
        monkeypatch.setattr(servers, "wait_until_paired", lambda url: None)
        monkeypatch.setattr(live_fleet, "replay", self.replay)
        return self

    @property
    def kinds(self) -> list[str]:
        """Of the engines behind the latest router."""
        return list(self.routed[-1][1].values())

    @contextmanager
    def run_cluster(self, flags: Sequence[str], folder: Path, name: str) -> Iterator[dict[str, Any]]:
        config = launch_cluster.read_config(list(flags)).config.to_cluster()
        launch_cluster.check_members(config)
        engines = [Instance(spec.name, spec.url, spec) for spec in instances(config, free_port)]
        self._devices = {engine.url: make_device(self._time_scale, self._profile) for engine in engines}
        self.clusters.append(list(flags))
        self.engines.append([engine.name for engine in engines])
        yield {"instances": [engine.to_dict() for engine in engines], "pid": os.getpid()}

    @contextmanager
    def run_router(
        self, router: servers.Router, described: Mapping[str, Any], log: Path, *, first_request: bool = True
    ) -> Iterator[str]:
        command = servers.router_command(router, described, free_port())
        if router.kind == "pla":
            read_router_config(command[3:])
        self.routed.append((router, {engine["name"]: engine["kind"] for engine in described["instances"]}))
        yield described["instances"][0]["url"]

    def fetch(self, url: str) -> dict[str, Any]:
        if url.endswith("/pla/state"):
            return {"flips": self.flips, "prefixes": self.prefixes}
        [device] = [device for base, device in self._devices.items() if url.startswith(f"{base}/")]
        return {"internal_states": [{"pla_emulation": device.state()}], "version": "0.5.17"}

    def replay(self, url: str, planned: list[Planned], *, timeout_s: float) -> list[Record]:
        for device in self._devices.values():
            work_a_pass(device, self.gap_share)
        records = []
        for request, times in zip(planned, self._answer_times(self, planned), strict=True):
            record = Record(request, request.at_s, prompt_ids=request.own_ids, sent_s=request.at_s, status=200)
            first_s, last_s = (self._time_scale * (time_s + self.late_s) for time_s in times)
            record.token_s, record.done_s = [first_s], last_s
            tokens = chain.expected(request.own_ids, request.output_tokens + 1).tokens
            record.output_ids = tuple(tokens[self.wrong :])
            records.append(record)
        return records


def count_shared(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(len(one), len(other)))


class ChainInstance(FakeSglang):
    """A stateless fake that answers as an engine with the chain model does, on a device that is idle between answers.

    Attributes:
        wrong: whether its answers have a token too few.
    """

    def __init__(self, time_scale: float) -> None:
        script = Script(first_s=0.02, gap_s=0.01)
        super().__init__("stateless", script=script, disaggregation_bootstrap_port=free_port())
        self.device, self.wrong = make_device(time_scale), False
        self._kept: list[list[int]] = []  # prompts with their answers

    def describe(self) -> dict[str, Any]:
        info = super().describe()
        info["internal_states"][0]["pla_emulation"] = self.device.state()
        return info

    def _count_cached(self, prompt: list[int]) -> int:
        """Of its longest beginning that is kept. The last token is computed always."""
        shared = (count_shared(prompt, kept) for kept in self._kept)
        return min(max(shared, default=0), len(prompt) - 1)

    async def say(self, fields: dict[str, Any], leg: str) -> tuple[dict[str, Any], Iterable[Event]]:
        if "input_ids" not in fields:  # whether the router is ready
            return {"text": "yes"}, ()
        prompt = fields["input_ids"]
        cached_tokens = self._count_cached(prompt)
        work_a_pass(self.device, 0.02)
        await asyncio.sleep(self.script.first_s if leg == "prefill" else 2 * self.script.first_s)
        if leg == "prefill":
            return {"text": "", "meta_info": {}}, ()
        tokens = chain.expected(prompt, fields["sampling_params"]["max_new_tokens"]).tokens
        self._kept.append([*prompt, *tokens])
        meta: dict[str, Any] = {"cached_tokens": cached_tokens, "finish_reason": None}
        events = []
        for index in range(int(self.wrong), len(tokens)):
            ends = {"finish_reason": {"type": "stop"}} if index + 1 == len(tokens) else {}
            said = {"output_ids": [tokens[index]], "meta_info": meta | {"completion_tokens": len(tokens)} | ends}
            events.append(Event(b"data: " + dump(said) + b"\n\n", (tokens[index],)))
        return {"output_ids": list(tokens), "meta_info": meta}, [*events, Event(DONE)]
