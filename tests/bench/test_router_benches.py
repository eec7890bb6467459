"""Benches of the router: what they ask for, and what the pages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.check import parity, router_clients
from bench.harness.catalogue import BENCHES
from pla_sglang.policy.registry import live_policy_names

WHERE = {"environment": {"hardware": "2 x cpu", "plugin_commit": "abc"}, "profile": "p", "time_scale": 4.0, "seed": 0}


def policy(decisions: int, identical: int, **fields: Any) -> dict[str, Any]:
    counts = {"decisions": decisions, "identical": identical, "identical_share": identical / decisions}
    kinds = {"by_kind": {"dispatched": decisions}, "failed": 0, "tokens_wrong": 0, "plugin_commit": "abc"}
    return {**counts, **kinds, **fields}


def test_parity_asks_every_live_policy_once() -> None:
    assert sorted(parity.POLICIES.split(",")) == sorted(set(live_policy_names()) - {"minimal-load"})


def test_parity_counts_over_all_policies(tmp_path: Path) -> None:
    by_policy = {"pla": policy(300, 300), "cache-aware": policy(100, 90, tokens_wrong=2, plugin_commit="def")}
    totals = parity.totals(by_policy)
    assert totals["identical_share"] == 0.975
    assert (totals["decisions"], totals["tokens_wrong"], totals["commits"]) == (400, 2, ["abc", "def"])
    parity.plot(by_policy, tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 5000
    page = parity.page(WHERE | totals | {"by_policy": by_policy, "requests": 9, "rate_rps": 2.0, "instances": 4})
    assert "| `cache-aware` | 100 | 90.00% | 0 | 2 |" in page
    assert "| `pla` |" not in page, "it differs in nothing"
    assert "Alike in all, without a failed request or a wrong token: `pla`." in page
    assert "commit abc, def" in page


def test_the_load_client_gets_stock_flags_only() -> None:
    command = router_clients.command_of(BENCHES["router_clients"].parse(), "sglang", "http://x", "m")
    assert command[:2] == ["-m", "sglang.bench_serving"]
    assert not [part for part in command if "pla" in part]
