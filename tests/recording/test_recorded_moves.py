"""Recordings of policies that move running requests: what they saw of these is in the file, and a replay orders the
same moves."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from pla_sglang.fleet.router.control.observability.recorder import DecisionRecorder
from pla_sglang.fleet.router.control.policy_setup import RouterEffects
from pla_sglang.parity import replay_file
from pla_sglang.policy.interface.decisions import Migrate
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.pairs import PairRunner
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.runner import Refusal
from pla_sglang.profiles.load import load_profile
from pla_sglang.recording.file import RecordWriter, read
from pla_sglang.recording.rows import VERSION, Moved, RecordError, Running, Ticked
from pla_sglang.recording.setup import header_of
from pla_sglang.recording.views import plain_batch, restore_batch

PROFILE = "h100-llama3.1-8b-tp1"
ROOM = 40_000
FULL_ROOM = 15_000  # caches run full, without which the combination moves nobody
MOVERS = ("load-migration", "star", "star-no-prediction", "combined", "combined-roles")


class Moving(RouterEffects):
    """Every second move is carried out at once, the others are refused."""

    def __init__(self, fleet: FleetView, running: dict[str, list[Any]]) -> None:
        super().__init__(fleet, lambda view, length_class: None)
        self.running = running  # by request: instance, tokens, what is still to come
        self.orders = 0

    def migrate(self, action: Migrate, now_s: float) -> Refusal | None:
        self.orders += 1
        if self.orders % 2:
            return Refusal.NOT_MOVABLE
        self.running[action.rid][0] = action.target
        return None


class Life:
    """A made-up life of one prefill and three decode instances, whose requests grow at every step."""

    def __init__(self, path: Path, policy: str, room: int = ROOM, **fields: Any) -> None:
        self.rng = Random(11)
        self.fleet = FleetView([InstanceView(index, f"i{index}", kv_capacity_tokens=room) for index in range(4)])
        for index, role in enumerate((Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE)):
            self.fleet.set_role(self.fleet.instances[index], role, 0.0)
        values = {"kv_capacity_tokens": room, "ttft_slo_s": 2.0, "tpot_slo_s": 0.1, "instances": 4} | fields
        setup = Setup(load_profile(PROFILE), **values)
        self.recorder = DecisionRecorder(RecordWriter(path), header_of(policy, PROFILE, 2.0, setup), self.fleet)
        self.fleet.read_decodes_from(self.recorder.keep_decodes(self.list_decodes))
        self.running: dict[str, list[Any]] = {}
        self.effects = Moving(self.fleet, self.running)
        self.runner = PairRunner(build(policy, setup), self.fleet, self.effects, recording=self.recorder)

    def list_decodes(self, view: InstanceView) -> DecodeBatch:
        """Unknown lengths, requests that may not move, and load that is not listed are among them."""
        rows = [(rid, tokens, left) for rid, (at, tokens, left) in self.running.items() if at is view]
        batch = DecodeBatch.of(rows)
        batch.movable = np.array([int(rid[1:]) % 5 > 0 for rid, _, _ in rows], dtype=np.bool_)
        batch.unlisted_requests, batch.unlisted_tokens = view.index % 2, 100 * (view.index % 2)
        return batch

    def live(self, steps: int = 150) -> None:
        for step in range(steps):
            now_s = 0.2 * step
            self.come(step, now_s)
            for view in self.fleet.instances:
                held = [row for row in self.running.values() if row[0] is view]
                view.running, view.context_tokens = len(held), sum(row[1] for row in held)
                view.kv_used_tokens, view.token_interval_s = view.context_tokens, 0.02 + 0.001 * len(held)
            for number in range(len(self.runner.policy.controllers)):
                self.runner.tick(number, now_s + 0.05)
            self.go(now_s + 0.1)
        self.recorder.close_recorder()

    def come(self, step: int, now_s: float) -> None:
        """Most requests decode at one instance, whatever the policy says: there is something to level."""
        request = RequestView(f"r{step}", self.rng.randrange(20, 900), now_s)
        self.runner.arrive(request, now_s)
        self.runner.choose(request, now_s)
        at = self.fleet.instances[1 if self.rng.random() < 0.7 else self.rng.randrange(1, 4)]
        left = None if step % 7 == 0 else float(self.rng.randrange(50, 2500))
        self.running[request.rid] = [at, request.input_tokens, left]
        self.runner.first_token(request, at, now_s + 0.01)

    def go(self, now_s: float) -> None:
        for rid, row in list(self.running.items()):
            row[1] += 60
            row[2] = None if row[2] is None else row[2] - 60
            if (row[2] is None and row[1] > 3000) or (row[2] is not None and row[2] <= 0):
                del self.running[rid]
                self.runner.finish(RequestView(rid, 1, 0.0), 5, now_s)


def record(path: Path, policy: str, **fields: Any) -> Life:
    life = Life(path, policy, **fields)
    life.live()
    return life


@pytest.mark.parametrize("gain", [0.0, 1.0])
@pytest.mark.parametrize("policy", MOVERS)
def test_a_replay_orders_the_same_moves(policy: str, gain: float, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    room = FULL_ROOM if gain and policy.startswith("combined") else ROOM
    life = record(path, policy, room=room, move_gain=gain, scales=False)
    assert life.effects.orders >= 4, dict(life.runner.actions)
    header, result = replay_file(path)
    assert (header.version, header.setup["move_gain"]) == (VERSION, gain)
    assert result.identical_share == 1.0, result.differences
    ordered = [action for line in read(path) if isinstance(line, Ticked) for action in line.answer.actions]
    assert sum(action[0] == "migrate" for action in ordered) == life.effects.orders


def test_another_gain_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "star", move_gain=1.0)
    path.write_text(path.read_text().replace('"move_gain":1.0', '"move_gain":1000.0'))
    assert replay_file(path)[1].identical_share < 1.0


def test_running_requests_that_are_lost_are_found_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "star")
    lines = path.read_text().splitlines()
    kept = [line for line in lines if '"type":"running"' not in line]
    assert len(kept) < len(lines)
    path.write_text("\n".join(kept) + "\n")
    assert replay_file(path)[1].identical_share < 0.9


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    life = Life(path, "star")
    for step in range(6):
        life.runner.tick(0, 0.5 * step)
    life.recorder.close_recorder()
    assert sum(isinstance(line, Running) for line in read(path)) == 1


def test_moves_that_came_of_it_change_no_replay(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "star")
    lines = path.read_text().splitlines()
    half = len(lines) // 2
    now_s = next(float(msgspec.json.decode(line)["now_s"]) for line in lines[half:])
    moved = Moved(now_s, "r1", 1, 2, "pull", "star.migrate", 4096, 0.03)
    lines.insert(half, msgspec.json.encode(moved).decode())
    path.write_text("\n".join(lines) + "\n")
    assert [line for line in read(path) if isinstance(line, Moved)] == [moved]
    assert replay_file(path)[1].identical_share == 1.0


@pytest.mark.parametrize("version", [1, 2, 3])
def test_recordings_of_earlier_versions_replay(version: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "arrow")
    text = path.read_text()
    assert f'"version":{VERSION}' in text
    path.write_text(text.replace(f'"version":{VERSION}', f'"version":{version}'))
    assert replay_file(path)[1].identical_share == 1.0


def test_policies_that_move_nothing_read_no_running_requests(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "combined-roles", migrates=False, scales=False)
    assert not any(isinstance(line, Running) for line in read(path))
    assert replay_file(path)[1].identical_share == 1.0


def test_a_recording_without_running_requests_still_replays(tmp_path: Path) -> None:
    """As version 2 wrote it: its header has none of the fields of moves."""
    path = tmp_path / "run.jsonl"
    record(path, "arrow")
    text = path.read_text()
    header, _, rest = text.partition("\n")
    plain = msgspec.json.decode(header)
    plain["setup"] = {name: value for name, value in plain["setup"].items() if not name.startswith("move_")}
    path.write_text(msgspec.json.encode(plain | {"version": 2}).decode() + "\n" + rest)
    assert replay_file(path)[1].identical_share == 1.0
    path.write_text(msgspec.json.encode(plain | {"version": VERSION + 1}).decode() + "\n" + rest)
    with pytest.raises(RecordError, match=f"version {VERSION + 1}; this program reads 1 to {VERSION}"):
        replay_file(path)


def test_a_batch_survives_the_file() -> None:
    batch = DecodeBatch.of([("a", 10, 5.5), ("b", 20, None)])
    batch.movable[1] = False
    batch.unlisted_requests, batch.unlisted_tokens = 3, 77
    plain = msgspec.json.decode(msgspec.json.encode(plain_batch(batch)), type=type(plain_batch(batch)))
    restored = restore_batch(plain)
    assert plain_batch(restored) == plain_batch(batch)
    assert np.isnan(restored.remaining[1])
    assert restored.movable.tolist() == [True, False]
    assert (restored.unlisted_requests, restored.unlisted_tokens) == (3, 77)
