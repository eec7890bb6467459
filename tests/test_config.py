"""Knobs: ranges, command line, the way into child processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

import pytest

from pla_sglang import config
from pla_sglang.config import PlaConfig
from pla_sglang.errors import ConfigError


def parse(*arguments: str) -> PlaConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    config.add_cli_args(parser)
    return config.from_namespace(parser.parse_args(list(arguments)))


def test_everything_is_off_by_default() -> None:
    assert parse() == PlaConfig()
    assert not PlaConfig().enabled


def test_every_field_has_a_flag_and_every_flag_a_field() -> None:
    internal = {"controller_folder"}
    assert set(config._FLAGS) == {field.name for field in dataclasses.fields(PlaConfig)} - internal


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prefill-disagg", "temporal"], {"prefill_disagg": "temporal"}),
        (["--pla-boundary", "auto"], {"boundary_tokens": None}),
        (["--pla-boundary", "256"], {"boundary_tokens": 256}),
        (["--pla-slo-ttft-ms", "200"], {"slo_ttft_ms": 200.0}),
        (["--pla-wait-min-ms", "1.5", "--pla-wait-max-ms", "2"], {"wait_min_ms": 1.5, "wait_max_ms": 2.0}),
        (["--pla-long-chunk-tokens", "512"], {"long_chunk_tokens": 512}),
        (["--pla-long-max-age-ms", "3000"], {"long_max_age_ms": 3000.0}),
        (["--pla-long-order", "fcfs"], {"long_order": "fcfs"}),
        (["--pla-mixing=allow"], {"mixing": "allow"}),
        (["--prefill-disagg", "spatial", "--pla-role", "long"], {"prefill_disagg": "spatial", "role": "long"}),
        (
            ["--pla-telemetry", "tcp://[::1]:5000", "--pla-instance", "a"],
            {"telemetry": "tcp://[::1]:5000", "instance": "a"},
        ),
        (["--pla-short-ranks", "3", "--pla-pressure", "off"], {"short_ranks": 3, "pressure": "off"}),
        (
            ["--pla-graph-layout", "grid", "--pla-graph-budget-gb", "0.5", "--pla-graph-capture-budget-s", "0"],
            {"graph_layout": "grid", "graph_budget_gb": 0.5, "graph_capture_budget_s": 0.0},
        ),
    ],
)
def test_command_line(arguments: list[str], expected: dict[str, Any]) -> None:
    assert parse(*arguments) == PlaConfig(**expected)


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["--pla-graph-layout", "ring"], "--pla-graph-layout 'ring' is not known; allowed: off, varlen, grid"),
        (["--pla-graph-layout", "grid", "--pla-graph-budget-gb", "0"], "--pla-graph-budget-gb 0.0 is out of range"),
        (["--pla-graph-layout", "grid", "--pla-graph-capture-budget-s", "nan"], "--pla-graph-capture-budget-s nan"),
    ],
)
def test_bad_values_for_graphs_only_warn(
    arguments: list[str], warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server runs as stock; whatever else was asked for stays."""
    assert parse("--prefill-disagg", "temporal", *arguments) == PlaConfig(prefill_disagg="temporal")
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("warning: ")
    assert warning in shown[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prefill-disagg", "both"],
        ["--pla-boundary", "many"],
        ["--pla-boundary", "2.5"],
        ["--pla-wait-max-ms", "soon"],
        ["--pla-long-chunk-tokens", "1.5"],
        ["--pla-mixing", "sometimes"],
    ],
)
def test_argparse_refuses_wrong_types(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)) as caught:
        parse(*arguments)
    assert arguments[1] in str(caught.value) + capsys.readouterr().err


BAD = [
    ("prefill_disagg", "both", "off, temporal, spatial"),
    ("long_order", "random", "least-remaining, fcfs"),
    ("mixing", None, "never, allow"),
    ("boundary_tokens", 0, "1 to"),
    ("boundary_tokens", -5, "1 to"),
    ("boundary_tokens", 1 << 30, "1 to"),
    ("slo_ttft_ms", 0, "1 to"),
    ("slo_ttft_ms", math.nan, "1 to"),
    ("slo_ttft_ms", math.inf, "1 to"),
    ("slo_ttft_ms", 10**400, "1 to"),
    ("slo_ttft_ms", "200", "1 to"),
    ("slo_ttft_ms", True, "1 to"),
    ("wait_min_ms", -1.0, "0 to"),
    ("wait_max_ms", 60_001, "0 to"),
    ("long_chunk_tokens", 0, "1 to"),
    ("long_max_age_ms", 0, "1 to"),
    ("role", "fast", "mixed, short, long"),
    ("pressure", "high", "auto, off"),
    ("short_ranks", -1, "0 to"),
    ("pressure_interval_ms", 1, "10 to"),
    ("pressure_cool_down_ms", -1, "0 to"),
    ("pressure_hysteresis", -0.5, "0 to"),
    ("telemetry", "router:5000", "tcp://HOST:PORT"),
    ("telemetry", "tcp://router", "tcp://HOST:PORT"),
    ("telemetry", "tcp://router:0", "tcp://HOST:PORT"),
    ("telemetry", "ipc://", "ipc:///PATH"),
    ("telemetry", "http://router:80", "tcp://HOST:PORT"),
    ("telemetry", "tcp://router:5000 x", "tcp://HOST:PORT"),
    ("instance", "", "1 to 200"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD, ids=lambda part: str(part)[:20])
def test_bad_value_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlaConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(config._FLAGS[field][0])
    assert repr(value) in message
    assert allowed in message


def test_a_role_needs_scheduling() -> None:
    with pytest.raises(ConfigError, match="--pla-role short needs --prefill-disagg"):
        PlaConfig(role="short")


def test_who_reports() -> None:
    assert not PlaConfig(prefill_disagg="temporal").reports
    assert PlaConfig(telemetry="ipc:///x").reports
    pools = PlaConfig(prefill_disagg="spatial", controller_folder="/x")
    assert pools.reports
    assert config.controller_address(pools, "state") == "ipc:///x/state"
    assert config.controller_address(PlaConfig(), "state") is None


def test_minimum_above_maximum() -> None:
    with pytest.raises(ConfigError, match="--pla-wait-min-ms 5 is above --pla-wait-max-ms 2"):
        PlaConfig(wait_min_ms=5.0, wait_max_ms=2.0)


def test_replace_checks_and_keeps_the_rest() -> None:
    first = PlaConfig(prefill_disagg="temporal", boundary_tokens=100)
    assert first.replace(wait_max_ms=20.0) == dataclasses.replace(first, wait_max_ms=20.0)
    with pytest.raises(ConfigError, match="unknown knob 'speed'"):
        first.replace(speed=1)
    with pytest.raises(ConfigError, match="--pla-wait-min-ms"):
        first.replace(wait_min_ms=11.0)


def test_config_error_is_a_value_error() -> None:
    """SGLang's handlers answer a ValueError with status 400."""
    assert issubclass(ConfigError, ValueError)


def test_travels_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)
    assert config.current() == PlaConfig()
    mine = PlaConfig(prefill_disagg="temporal", boundary_tokens=300, slo_ttft_ms=250.0, long_order="fcfs")
    monkeypatch.setenv(config.CONFIG_ENV, "")  # so that monkeypatch removes what publish writes
    config.publish(mine)
    assert config.current() == mine


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"speed": 1}', ConfigError),
        ('{"wait_max_ms": -1}', ConfigError),
        ("not json", json.JSONDecodeError),
    ],
)
def test_a_broken_environment_is_an_error(text: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, text)
    with pytest.raises(error):
        config.current()
