from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.harness.arms import (
    ABLATION,
    ArmError,
    build_arms,
    memory_flags,
    parse_peer,
    platform_overlay,
    shared_flags,
)


def test_stock_comes_first_and_loads_nothing_of_ours_on_a_gpu() -> None:
    arms = build_arms(["ours", "stock"], [], device="cuda")
    assert [arm.name for arm in arms] == ["stock", "ours"]
    assert arms[0].env == {"SGLANG_PLUGINS": "none"}
    assert arms[0].module == "sglang.launch_server"
    assert arms[1].module == "pla_sglang.launch_server"
    assert arms[1].flags == ("--prefill-disagg", "temporal")


def test_stock_on_a_cpu_loads_the_platform_only() -> None:
    assert build_arms(["stock"], [], device="cpu")[0].env == {"SGLANG_PLUGINS": "pla_cpu"}


def test_ablation_adds_each_part_once() -> None:
    names = [arm.name for arm in build_arms(["stock", "ours"], [], device="cpu", ablation=True)]
    assert names == ["stock", "ours", *(name for name in ABLATION if name != "full")]


def test_our_flags_reach_our_arms_but_not_off_and_stock() -> None:
    arms = build_arms(["stock", "ours", "off"], [], device="cpu", our_flags=["--pla-boundary", "600"])
    assert [arm.flags[-2:] == ("--pla-boundary", "600") for arm in arms] == [False, True, False]


def test_peer_keeps_its_flags_and_python() -> None:
    peer = parse_peer(
        f"spf={sys.executable}:--schedule-policy shortest-prefill-first --chunked-prefill-size 256", "cpu"
    )
    assert peer.flags[-1] == "256"
    assert peer.python == sys.executable
    assert peer.peer is False
    assert peer.env == {"SGLANG_PLUGINS": "pla_cpu"}


@pytest.mark.parametrize("text", ["", "name", "name=", "=python:", f"stock={sys.executable}:", "x=/nowhere:--flag"])
def test_bad_peers(text: str) -> None:
    with pytest.raises(ArmError):
        parse_peer(text, "cpu")


def test_an_arm_twice_is_refused() -> None:
    with pytest.raises(ArmError, match="twice: off"):
        build_arms(["off", "off"], [], device="cpu")


def test_cpu_flags_and_the_last_word_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    flags = shared_flags(model_path=tmp_path, device="cpu", chunk_tokens=7, kv_tokens=99, extra=["--page-size", "16"])
    assert "--disable-overlap-schedule" in flags
    assert flags[flags.index("--dtype") + 1] == "float32"
    assert flags[flags.index("--chunked-prefill-size") + 1] == "7"
    assert flags[flags.index("--max-total-tokens") + 1] == "99"
    assert flags[-2:] == ["--page-size", "16"]


def test_gpu_keeps_the_overlap_schedule_and_sizes_its_own_pool() -> None:
    flags = shared_flags(model_path=Path("m"), device="cuda", chunk_tokens=8192, kv_tokens=None)
    assert "--disable-overlap-schedule" not in flags
    assert "--max-total-tokens" not in flags


@pytest.mark.parametrize(
    ("device", "position", "arms", "expected"),
    [("cpu", 0, 2, []), ("cuda", 0, 1, []), ("cuda", 0, 2, ["0.440"]), ("cuda", 1, 2, ["0.880"])],
)
def test_memory_is_shared_on_one_gpu(device: str, position: int, arms: int, expected: list[str]) -> None:
    assert memory_flags(device, position, arms)[1:] == expected


def test_overlay_offers_the_platform_and_nothing_else(tmp_path: Path) -> None:
    environ = platform_overlay(tmp_path / "overlay")
    folder = Path(environ["PYTHONPATH"])
    assert sorted(path.name for path in folder.iterdir()) == ["pla_kernels", "pla_sglang", "pla_sglang-0.1.0.dist-info"]
    entry_points = (folder / "pla_sglang-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert "pla_cpu" in entry_points
    assert "plugins" not in entry_points
