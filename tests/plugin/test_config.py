"""Knobs: ranges, command line, the way into child processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pla_sglang import launch_server
from pla_sglang.common.checks import declared_fields
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin import config
from pla_sglang.plugin.config import PlaConfig

FLAGS = {declared.field.name: declared.knob.name for declared in declared_fields(PlaConfig)}


def parse(*arguments: str) -> PlaConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    config.add_cli_args(parser)  # SGLang's parser is a plain one
    return config.from_namespace(parser.parse_args(list(arguments)))


def test_everything_is_off_by_default() -> None:
    assert parse() == PlaConfig()
    assert not PlaConfig().enabled


def test_every_field_has_a_flag_and_every_flag_a_field() -> None:
    internal = {"controller_folder"}
    assert set(FLAGS) == {field.name for field in dataclasses.fields(PlaConfig)} - internal
    assert all(flag.startswith(("--pla-", "--prefill-disagg")) for flag in FLAGS.values())


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
        (["--pla-lost-max-age-ms", "60000"], {"lost_max_age_ms": 60_000.0}),
        (["--pla-lost-fcfs-times", "10"], {"lost_fcfs_times": 10.0}),
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
        (["--pla-graph-layout", "ring"], "--pla-graph-layout 'ring' is not known; allowed: auto, off, varlen, grid"),
        (
            ["--pla-graph-layout", "grid", "--pla-graph-budget-gb", "0"],
            "--pla-graph-budget-gb 0 is out of range; allowed: 0.001 to 1024 GiB",
        ),
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
def test_wrong_types_are_refused_by_name(arguments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert str(caught.value).startswith(f"{arguments[0]} ")
    assert arguments[1] in str(caught.value)
    assert "allowed: " in str(caught.value)


BAD = [
    ("prefill_disagg", "both", "off, temporal, spatial, dopd"),
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
    ("lost_max_age_ms", 0, "1 to"),
    ("lost_fcfs_times", -1, "0 to"),
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
    assert message.startswith(FLAGS[field])
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
    assert config.current() is config.current()  # hooks ask some times a request in each pass


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


@pytest.mark.parametrize(
    ("arguments", "file", "line"),
    [
        (["--pla-bondary", "3"], "", "unknown argument '--pla-bondary'; did you mean '--pla-boundary'?"),
        ([], "pla-bondary: 3", "{file}: unknown key 'pla-bondary'; did you mean 'pla-boundary'?"),
        ([], "pla_boundary: 3", "{file}: unknown key 'pla_boundary'; did you mean 'pla-boundary'?"),
        ([], "pla-wait-max-ms: -1", "{file}: pla-wait-max-ms -1 is out of range; allowed: 0 to 60000 ms"),
        (["--pla-wait-max-ms", "x"], "", "--pla-wait-max-ms 'x' is no number; allowed: 0 to 60000 ms"),
    ],
)
def test_a_server_refuses_with_one_line_what_only_looks_like_ours(
    arguments: list[str], file: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model-path: m\ntp: 2\n{file}\n")
    with pytest.raises(SystemExit, match="2"):
        launch_server.main(["--config", str(path), "--tp-size", "2", *arguments, "--print-config"])
    assert capsys.readouterr().err == "error: " + line.replace("{file}", str(path)) + "\n"


def test_a_servers_printed_configuration_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model-path: m\nprefill-disagg: temporal\npla-boundary: 77\npla-long-order: fcfs\n")
    arguments = ["--config", str(path), "--port", "1", "--pla-long-order=least-remaining", "--print-config"]
    launch_server.main(arguments)
    path.write_text(capsys.readouterr().out)
    given = launch_server.own_arguments(["--config", str(path)])
    assert config.from_texts(given) == PlaConfig(prefill_disagg="temporal", boundary_tokens=77)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("launch_router", []),
        ("launch_server", []),
        ("launch_cluster", ["--unified", "1"]),
        ("simulate", ["--trace", "requests.csv", "--slo-ttft-ms", "400", "--slo-tpot-ms", "40"]),
        ("profile", ["--url", "http://127.0.0.1:1", "--name", "mine", "--out", "mine.json"]),
    ],
)
def test_a_printed_configuration_may_find_no_reader(command: str, arguments: list[str]) -> None:
    """As with ``--print-config | head``."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", f"pla_sglang.{command}", *arguments, "--print-config"],
            stdout=writing,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("host", "address", "network"),
    [
        ("127.0.0.1", "127.0.0.1", "lo"),
        ("localhost", "127.0.0.1", "lo"),
        ("::1", "::1", "lo"),
        ("10.0.0.7", "10.0.0.7", None),  # on its network cards UCX chooses
        ("0.0.0.0", None, None),
        ("::", None, None),
        ("node-1", None, None),
        ("", None, None),
    ],
)
@pytest.mark.parametrize("own", [{}, {"HOST_IP": "10.9.9.9", "UCX_NET_DEVICES": "mlx5_0:1"}])
def test_sockets_of_kv_listen_where_the_server_does(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str | None, network: str | None, own: dict[str, str]
) -> None:
    """But for what an operator has set."""
    monkeypatch.setattr(os, "environ", dict(own))
    config.publish_address(host)
    wanted = {"SGLANG_HOST_IP": address, "UCX_NET_DEVICES": network} if not own else {}
    assert os.environ == own | {name: value for name, value in wanted.items() if value is not None}


def test_the_host_takes_the_address_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils.network import get_local_ip_auto

    monkeypatch.setattr(os, "environ", {})
    config.publish_address("127.0.0.1")
    monkeypatch.setattr(os, "getenv", lambda name, default=None: os.environ.get(name, default))
    assert get_local_ip_auto() == "127.0.0.1"
