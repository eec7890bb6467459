"""Keys from files and from the environment, for the router, a server and a cluster; and that no message has one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pla_sglang import launch_cluster, launch_router
from pla_sglang.common import cli, key_sources
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.secret_names import HIDDEN
from pla_sglang.fleet.cluster.instance import Instance
from pla_sglang.fleet.cluster.spec import EngineSpec
from pla_sglang.plugin.config import add_cli_args, read_server_keys
from pla_sglang.plugin.engine.hooks.hidden_keys import after_repr, after_resolved_config_dict

KEY = "mark-7d1f"
VARIABLES = ("PLA_ROUTER_API_KEY", "PLA_ROUTER_ADMIN_KEY", "PLA_WORKER_API_KEY", "PLA_WORKER_ADMIN_KEY")
FLAGS = ("--api-key", "--admin-key", "--worker-api-key", "--worker-admin-key")
Make = Callable[..., str]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    key_sources._warn_once.cache_clear()


@pytest.fixture
def key_file(tmp_path: Path) -> Make:
    def make(content: bytes = f"{KEY}\n".encode(), mode: int = 0o600) -> str:
        path = tmp_path / "key"
        path.write_bytes(content)
        path.chmod(mode)
        return str(path)

    return make


def router_keys(*arguments: str) -> tuple[str, ...]:
    config, _ = launch_router.read_config(arguments)
    control = config.control
    return config.relay.api_key, config.relay.admin_key, control.worker_api_key, control.worker_admin_key


@pytest.mark.parametrize(("index", "flag"), [*enumerate(FLAGS)])
def test_each_key_of_the_router_has_three_sources(
    index: int, flag: str, key_file: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = key_file()
    assert router_keys(f"{flag}-file", path)[index] == KEY
    config = tmp_path / "router.yaml"
    config.write_text(f"{flag.removeprefix('--')}-file: {path}\n")
    assert router_keys("--config", str(config))[index] == KEY
    monkeypatch.setenv(VARIABLES[index], "of the environment")
    assert router_keys()[index] == "of the environment"
    assert router_keys("--config", str(config))[index] == KEY, "a file is nearer than the environment"
    assert router_keys("--config", str(config), flag, "typed")[index] == "typed"
    assert router_keys(flag, "")[index] == "", "none, as was said"
    with pytest.raises(ConfigError, match=f"{flag}-file and {flag} are both given"):
        router_keys(flag, "typed", f"{flag}-file", path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (f"{KEY}\n{KEY}\n".encode(), "one line"),
        (KEY.encode() + b"\0", "one line"),
        (KEY.encode() + b"\xff", "no text in UTF-8"),
        (KEY.encode() * 1000, "more than 4096 bytes"),
    ],
)
def test_a_bad_key_is_refused_and_not_shown(
    content: bytes, why: str, key_file: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_router.main(["--api-key-file", key_file(content)]) == cli.EXIT_BAD_ARGUMENTS
    said = capsys.readouterr().err
    assert why in said
    assert KEY not in said


def test_a_key_that_is_no_header_is_not_shown_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="not shown") as raised:
        router_keys("--api-key", f"{KEY}\r\nx: y")
    assert KEY not in str(raised.value)
    config = tmp_path / "router.yaml"
    for line in (f'api-key: "{KEY}', f"api-key: [{KEY}", f"api-key: *{KEY}", f"api-key: @{KEY}"):
        config.write_text(line + "\n")
        with pytest.raises(ConfigError) as raised:
            router_keys("--config", str(config))
        assert KEY not in str(raised.value)
    monkeypatch.setenv("PLA_ROUTER_API_KEY", f"{KEY}\n{KEY}")
    with pytest.raises(ConfigError, match="the variable PLA_ROUTER_API_KEY is not valid") as raised:
        router_keys()
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_may_read_is_warned_of_once(
    mode: int, warns: bool, key_file: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = key_file(mode=mode)
    assert [router_keys("--api-key-file", path)[0] for _ in range(2)] == [KEY, KEY]
    assert capsys.readouterr().err.count("can be read by every user") == warns


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--api-key-file /nowhere/key: No such file"):
        router_keys("--api-key-file", "/nowhere/key")


def test_keys_of_a_server(key_file: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(*arguments: str) -> tuple[str | None, str | None]:
        parser = argparse.ArgumentParser()
        for flag in ("--api-key", "--admin-api-key"):  # SGLang's own
            parser.add_argument(flag)
        add_cli_args(parser)
        found = read_server_keys(parser.parse_args(arguments))
        return found.api_key, found.admin_api_key

    assert keys() == (None, None)
    assert keys("--api-key", "a", "--admin-api-key-file", key_file()) == ("a", KEY)
    monkeypatch.setenv("PLA_WORKER_API_KEY", "e")
    assert keys("--admin-api-key", "b") == ("e", "b")
    assert keys("--api-key", "a") == ("a", None)
    with pytest.raises(ConfigError, match="--api-key-file and --api-key are both given"):
        keys("--api-key", "a", "--api-key-file", key_file())


def test_a_cluster_hands_keys_on_in_the_environment(key_file: Make, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--stateless",
        "1",
        "--api-key",
        KEY,
        "--router-admin-key-file",
        key_file(),
        "--chunked-prefill-size",
        "8",
    ]
    options = launch_cluster.read_config(arguments).config
    assert options.key_variables() == {
        "PLA_WORKER_API_KEY": KEY,
        "PLA_WORKER_ADMIN_KEY": "",
        "PLA_ROUTER_API_KEY": KEY,  # whoever may not ask an engine may not ask it through the router
        "PLA_ROUTER_ADMIN_KEY": KEY,
    }
    config = options.to_cluster()
    assert KEY not in " ".join([*config.common, *config.router_extra])
    with pytest.raises(SystemExit):
        launch_cluster.read_config([*arguments, "--router-args", f"--api-key {KEY}", "--print-config"])
    printed = capsys.readouterr().out
    assert KEY not in printed
    assert "# router-args: has a secret, not shown" in printed


def test_a_cluster_has_keys_for_our_router_alone() -> None:
    options = launch_cluster.read_config(["--unified", "1", "--router-api-key", KEY]).config
    with pytest.raises(ConfigError, match="--router-api-key is not for --router sglang") as raised:
        options.to_cluster()
    assert KEY not in str(raised.value)


def test_the_state_file_has_no_key_that_was_typed_for_an_engine() -> None:
    argv = ("--port", "1", "--api-key", KEY, f"--admin-api-key={KEY}")
    shown = Instance("a", "http://a:1", EngineSpec("a", "unified", "a", 1, None, argv)).to_dict()["argv"]
    assert shown == ["--port", "1", "--api-key", HIDDEN, f"--admin-api-key={HIDDEN}"]


def test_a_server_shows_its_arguments_without_keys() -> None:
    arguments = {"model_path": "/m", "api_key": KEY, "admin_api_key": None, "extra": f'{{"hf_token": "{KEY}"}}'}
    shown = after_resolved_config_dict(arguments, None, {})
    assert shown == {**arguments, "api_key": HIDDEN, "extra": f'{{"hf_token": "{HIDDEN}"}}'}
    for given in (argparse.Namespace(**arguments), msgspec.defstruct("Namespace", arguments, dict=True)(**arguments)):
        text = after_repr(repr(given), given)
        assert KEY not in text
        assert f"api_key='{HIDDEN}'" in text
        assert "admin_api_key=None" in text
