"""The bench ``survive``: its steps, and what it makes of them."""

from __future__ import annotations

import random
from typing import Any

from bench.check import survive
from bench.check.faults.bodies import SAMPLED, SCHEMA, TOOL
from bench.check.faults.table import choose_kills
from bench.check.survive import CHAT
from bench.harness.catalogue import BENCHES
from pla_sglang import launch_cluster


def test_chats_take_turns() -> None:
    kinds = [survive.make_stream(CHAT, "r", number, random.Random(number)).body.kind for number in range(3)]
    assert kinds == [SCHEMA, TOOL, SCHEMA]
    assert survive.make_stream(SAMPLED, "r", 0, random.Random(0)).body.kind == SAMPLED


KILL = {"streams": 8, "completed": 8, "tokens": 900, "tokens_wrong": 0, "errors": [], "plugin_commit": "c"}
KILL |= {"failed_to_blame": 0, "longest_silence_s": 0.5, "longest_wait_s": 0.25, "silence": "r1"}
EMPTY = KILL | {"hops": [], "streams_here": 8, "streams_left": 8, "empty_s": 6.0, "ended_s": None, "aborted": 0.0}


def pairs_of(**changes: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    hops = [{"why": "survive", "tokens": 1, "gap_s": gap_s} for gap_s in (0.5, 0.25, None)]
    frozen = KILL | {"hops": [{"why": "survive", "tokens": 1, "gap_s": 6.5}], "longest_silence_s": 6.0}
    frozen["silence"] = "r7: 6.2 s"
    steps = [({"act": "kill"}, KILL | {"hops": hops}), ({"act": "freeze_all"}, frozen)]
    return [*steps, ({"act": "drain"}, EMPTY), ({"act": "sigterm"}, EMPTY | {"ended_s": 11.0} | changes)]


def test_figures_of_the_steps() -> None:
    result = survive.sum_up(pairs_of(), 3.0)
    assert (result["streams"], result["killed"], result["completed"], result["streams_hit"]) == (16, 1, 16, 4)
    assert (result["gap_p50_s"], result["drain_s"], result["sigterm_s"], result["ended_s"]) == (0.375, 2.0, 2.0, 11.0)
    assert (result["crashes"], result["freezes"], result["blackholes"]) == (0, 1, 0)
    assert (result["longest_silence_s"], result["longest_wait_s"]) == (6.0, 0.25)
    assert result["longest_silence"] == "r7: 6.2 s"
    assert result["drain_aborted"] == 0
    assert survive.is_right(result)
    assert not survive.is_right(survive.sum_up(pairs_of(completed=7), 3.0))
    assert not survive.is_right(survive.sum_up(pairs_of(aborted=1.0), 3.0))
    assert not survive.is_right(survive.sum_up(pairs_of(tokens_wrong=1), 3.0))
    assert not survive.is_right(survive.sum_up(pairs_of(bytes_wrong=1), 3.0))
    assert not survive.is_right(result | {"longest_silence_s": 20.0}), "as long as its instance was frozen"
    crashed = pairs_of()
    crashed[1] = ({"act": "crash"}, crashed[1][1] | {"completed": 7, "failed_to_blame": 1})
    assert survive.is_right(survive.sum_up(crashed, 3.0)), "the scheduler may have died of it"
    some = survive.sum_up(pairs_of()[1:2], 3.0)
    assert (some["gap_p99_s"], some["drain_s"], some["sigterm_s"], some["drain_aborted"]) == (None, None, None, 0)
    about = {"instances": 3, "policy": "p", "wave": 8, "profile": "x", "time_scale": 3.0, "seed": 0}
    page = survive.page(about | result | {"environment": {"hardware": "a cpu", "plugin_commit": "c"}})
    assert "`drain_s` | 2 |" in page


def test_steps_and_flags() -> None:
    options = BENCHES["survive"].parse("--streams", "60", "--wave", "20")
    keys = survive.keys_of(options)
    models = [(key["model"], key["act"]) for key in keys]
    first, second, last = choose_kills(3, options.seed)
    kills = [(SAMPLED, first), (SAMPLED, second)]
    assert models == [*kills, (SAMPLED, "drain"), (SAMPLED, "sigterm"), (CHAT, last)]
    assert "--migration" in survive.router_of(options).flags
    for model in (SAMPLED, CHAT):
        config = launch_cluster.read_config(survive.cluster_flags(model, options)).config.to_cluster()
        launch_cluster.check_members(config)
        assert config.router == "none", "it stands behind proxies"
