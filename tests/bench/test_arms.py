from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.harness import arms as arms_module
from bench.harness.arms import (
    ABLATION,
    HRRN,
    INTERVAL,
    MIXED,
    SPF,
    ArmError,
    build_arms,
    find_lacking,
    memory_flags,
    parse_peer,
    platform_overlay,
    shared_flags,
    startable,
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
        f"spf9={sys.executable}:--schedule-policy shortest-prefill-first --chunked-prefill-size 256", "cpu"
    )
    assert peer.flags[-1] == "256"
    assert peer.python == sys.executable
    assert peer.peer is False
    assert peer.env == {"SGLANG_PLUGINS": "pla_cpu"}


@pytest.mark.parametrize("text", ["", "name", "name=", "=python:", f"stock={sys.executable}:", "x=/nowhere:--flag"])
def test_bad_peers(text: str) -> None:
    with pytest.raises(ArmError):
        parse_peer(text, "cpu")


def test_arms_of_stock_are_stock_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms_module, "find_lacking", lambda flags: [])
    arms = build_arms(["spf", "hrrn", "ours", "stock"], [], device="cpu", tuned_chunk_tokens=512)
    assert [arm.name for arm in arms] == ["stock", "spf", "hrrn", "ours"]
    assert arms[1].flags == ("--schedule-policy", "shortest-prefill-first", "--chunked-prefill-size", "512")
    assert arms[2].flags == ("--schedule-policy", "hrrn")
    assert {(arm.module, *arm.env.values()) for arm in arms[:3]} == {("sglang.launch_server", "pla_cpu")}
    assert build_arms(["spf"], [], device="cpu")[0].flags == SPF, "the chunk of all, where the bench knows no shorts"


def test_an_sglang_without_an_arm_leaves_it_out_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arms_module, "flags_of_sglang", lambda: {"--schedule-policy", "--enable-mixed-chunk"})
    monkeypatch.setattr(arms_module, "has_order", lambda name: False)
    assert find_lacking([*SPF, *MIXED, INTERVAL[0]]) == [INTERVAL[0], " ".join(SPF)]
    assert startable(["stock", "spf", "ours"]) == ["stock", "ours"]
    assert "has no --schedule-policy shortest-prefill-first" in capsys.readouterr().err
    with pytest.raises(ArmError, match=r"arm 'interval': SGLang .* has no --prefill-decode-interval, "):
        build_arms(["interval"], [], device="cpu")


def test_the_installed_sglang_is_asked() -> None:
    """Flags are named as SGLang parses them: it has all of the newer ones, or none."""
    newer = [*INTERVAL[::2], " ".join(SPF), " ".join(HRRN)]
    assert find_lacking([*SPF, *HRRN, *MIXED, *INTERVAL]) in ([], newer)
    assert find_lacking(["--chunked-prefill-size", "512", "--no-such-flag"]) == ["--no-such-flag"]


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
