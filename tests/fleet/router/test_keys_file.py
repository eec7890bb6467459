"""Keys of clients in a file: who comes in, as whom, and what is wrong with a file."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.relays import Setting, setting
from support.router_process import router_process
from support.router_scene import Scene, scene
from support.serving import until

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.keys_file import KeysFile
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.launch_router import main

ASK = {"text": "hello"}
KEY, OLD, OTHER = "key-of-a-0123456789abcdef", "key-of-a-that-is-old-0123456789", "key-of-b-0123456789abcdef"
SECRETS = (KEY, OLD, OTHER, *(hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OLD, OTHER)))


def entry(key: str, tenant: str, **further: Any) -> dict[str, Any]:
    return {
        "id": f"id-{key[-5:]}-{tenant}",
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "tenant": tenant,
        **further,
    }


def write_keys(path: Path, **limit: float) -> Path:
    keys = [entry(KEY, "a", expires="2099-01-01T00:00:00Z"), entry(OLD, "a", expires="2020-01-01T00:00:00Z")]
    path.write_text(json.dumps({"tenants": {"a": limit, "b": {}}, "keys": [*keys, entry(OTHER, "b")]}))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_who_comes_in(tmp_path: Path) -> None:
    config = RelayConfig(keys_file=write_keys(tmp_path / "keys.json"), admin_key="admin")
    async with setting("unified", config=config) as here:
        wrong = []
        for headers in ({}, bearer("wrong"), bearer(SECRETS[3]), {"Authorization": f"Basic {KEY}"}, bearer("admin")):
            answer = await here.ask(ASK, headers=headers)
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            wrong.append(answer.error)
        assert all(error == wrong[0] for error in wrong)
        assert wrong[0]["type"] == "key"
        expired = await here.ask(ASK, headers=bearer(OLD))
        assert (expired.status, expired.error["message"]) == (401, "the key has expired")
        assert here.instances[0].requests == []
        assert (await here.ask(ASK, headers=bearer(KEY))).status == 200
        head, _ = here.instances[0].requests[0]
        assert b"authorization" not in dict(head.headers)  # it is for the router


async def test_the_tenant_is_that_of_the_key(tmp_path: Path) -> None:
    config = RelayConfig(keys_file=write_keys(tmp_path / "keys.json"), admin_key="admin")
    async with setting("unified", config=config) as here:
        await here.ask(ASK, headers=bearer(KEY) | {"x-tenant-id": "b"})
        await here.ask(ASK, headers=bearer(OTHER))
        assert [ask.tenant for ask in here.control.of(m.Ask)] == ["a", "b"]


async def test_operators_keep_their_own_key(tmp_path: Path) -> None:
    config = RelayConfig(keys_file=write_keys(tmp_path / "keys.json"), admin_key="admin")
    async with setting("unified", config=config) as here:
        for key, status in ((KEY, 401), ("admin", 200)):
            assert (await here.ask(None, "/pla/state", method="GET", headers=bearer(key))).status == status


async def test_a_new_version_counts_and_a_broken_one_does_not(tmp_path: Path, caplog: Any) -> None:
    path = write_keys(tmp_path / "keys.json")
    async with setting("unified", config=RelayConfig(keys_file=path, admin_key="admin")) as here:
        keys = here.relay.context.keys
        assert keys is not None
        path.write_text("{")
        assert not keys.follow_file()
        assert not keys.follow_file()
        assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
        assert (await here.ask(ASK, headers=bearer(KEY))).status == 200
        path.write_text(json.dumps({"tenants": {"b": {}}, "keys": [entry(OTHER, "b")]}))
        assert keys.follow_file()
        assert await statuses(here) == [401, 200]
        path.unlink()
        assert not keys.follow_file()
        assert await statuses(here) == [401, 200]


async def statuses(here: Setting) -> list[int]:
    return [(await here.ask(ASK, headers=bearer(key))).status for key in (KEY, OTHER)]


GOOD = entry(KEY, "a")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ({"keys": []}, "Object missing required field `tenants`"),
        ({"tenants": {}, "keys": [{**GOOD, "key": KEY}]}, "Object contains unknown field `key` - at `$.keys[0]`"),
        ({"tenants": {"a": {"burst_seconds": "x"}}, "keys": []}, "Expected `float | null`, got `str` - at `$.tenants"),
        ({"tenants": {"a": {"burst_seconds": 1}}, "keys": []}, "tenants 'a': prefill_seconds_per_second and burst"),
        (
            {"tenants": {"a": {"burst_seconds": 1, "prefill_seconds_per_second": 0}}, "keys": []},
            "tenants 'a': prefill_seconds_per_second 0.0 is out of range; allowed: above 0",
        ),
        ({"tenants": {"a b": {}}, "keys": []}, "tenants: 'a b' is not valid"),
        ({"tenants": {"b": {}}, "keys": [GOOD]}, f"keys[0] '{GOOD['id']}': tenant 'a' is not known"),
        ({"tenants": {"a": {}}, "keys": [{**GOOD, "sha256": KEY}]}, f"keys[0] '{GOOD['id']}': sha256 is not valid"),
        ({"tenants": {"a": {}}, "keys": [GOOD, GOOD]}, f"keys[1] '{GOOD['id']}': id is empty or stands there twice"),
        ({"tenants": {"a": {}}, "keys": [GOOD, {**GOOD, "id": "x"}]}, "keys[1] 'x': sha256 is that of "),
        ({"tenants": {"a": {}}, "keys": [{**GOOD, "expires": "soon"}]}, "Invalid RFC3339 encoded datetime - at `$.key"),
        (
            {"tenants": {"a": {}}, "keys": [{**GOOD, "expires": "2027-01-01T00:00:00"}]},
            "Expected `datetime` with a timezone component - at `$.keys[0].expires`",
        ),
    ],
)
def test_a_broken_file_ends_the_start_with_one_line(
    content: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["--keys-file", str(path), "--admin-key", "x"]) == EXIT_BAD_ARGUMENTS
    said = capsys.readouterr().err
    assert said.startswith(f"error: --keys-file {path}: ")
    assert line in said
    assert said.count("\n") == 1
    assert not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--keys-file", "x", "--api-key", "y", "--admin-key", "z"],
            "--keys-file and --api-key cannot be given together",
        ),
        (["--keys-file", "x"], "--keys-file needs --admin-key"),
        (["--keys-file", "/no/file", "--admin-key", "z"], "/no/file: No such file or directory"),
    ],
)
def test_flags_that_do_not_fit(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == EXIT_BAD_ARGUMENTS
    assert line in capsys.readouterr().err


def limited(one: Scene, path: Path, **limit: float) -> None:
    """The control plane follows a file that sets this limit for tenant a."""
    plane: ControlPlane = one.plane
    plane.dispatcher.limits.set_limits(KeysFile(write_keys(path, **limit)).keys.limits)


async def test_a_tenant_beyond_its_limit_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with scene(["null"]) as one:
        predictor, [worker] = one.plane.policy.predictor, one.plane.table.workers
        assert predictor is not None
        cost_s = predictor.cost_s(4000, 0, worker.view)
        limited(one, tmp_path / "k", prefill_seconds_per_second=cost_s / 10, burst_seconds=1.5 * cost_s)
        asked: dict[str, Any] = {"tenant": "a", "input_tokens": 4000, "body": None, "exact_tokens": True}
        one.assign("first", **asked)
        refused = one.be_refused("second", **asked)
        assert (refused.status, refused.code) == (429, "tenant_limit")
        assert refused.retry_after_s == pytest.approx(5.0, abs=0.5)
        one.assign("of-another", **asked | {"tenant": "b"})
        one.assign("of-nobody", **asked | {"tenant": None})
        text = one.admin("GET", "/metrics")[1]
        assert 'pla_router_admissions_total{decision="refused",reason="tenant_limit"} 1.0' in text
        assert 'pla_router_tenant_limit_left_seconds{tenant="a"}' in text
        one.ended("second", m.Outcome.REFUSED)
        one.ended("first", cached_tokens=3999)  # nearly nothing was computed
        one.assign("third", **asked)
        for rid in ("third", "of-another", "of-nobody"):
            one.ended(rid)
        await one.at_rest()


async def test_another_attempt_costs_nothing(tmp_path: Path) -> None:
    async with scene(["null", "null"]) as one:
        limited(one, tmp_path / "k", prefill_seconds_per_second=1e-6, burst_seconds=1e-3)
        asked: dict[str, Any] = {"tenant": "a", "input_tokens": 9000, "body": None, "exact_tokens": True}
        first = one.assign("first", **asked)
        one.reach("first", m.Milestone.SENT)
        before = dict(one.plane.dispatcher.limits.find_left_s(0.0))
        again = one.ask_again("first", 1, m.Cause.FULL, over={"refused_by": (first.decode,)}, **asked)
        assert isinstance(again, m.Assign)
        assert dict(one.plane.dispatcher.limits.find_left_s(0.0)) == before
        one.ended("first")
        await one.at_rest()


async def test_what_an_instance_refuses_is_not_charged(tmp_path: Path) -> None:
    async with scene(["null"]) as one:
        limited(one, tmp_path / "k", prefill_seconds_per_second=1e-6, burst_seconds=1e-3)
        asked: dict[str, Any] = {"tenant": "a", "input_tokens": 9000, "body": None, "exact_tokens": True}
        one.assign("first", **asked)
        one.be_refused("second", **asked)
        one.ended("first", m.Outcome.INSTANCE_REFUSED)
        one.ended("second", m.Outcome.REFUSED)
        one.assign("third", **asked)
        one.ended("third")
        await one.at_rest()


@pytest.mark.parametrize("relays", ["0", "1"])
def test_a_router_with_keys_says_none_of_them(relays: str, tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.json", prefill_seconds_per_second=1e-5, burst_seconds=1e-3)
    arguments = ["--relay-workers", relays, "--keys-file", str(path), "--admin-key", "admin", "--access-log", "-"]
    body = json.dumps({"text": "words " * 9000}).encode()
    with router_process(["null"], arguments, tmp_path) as router:
        assert router.ask("/generate", body)[0] == 401
        assert router.ask("/generate", body, bearer("wrong"))[0] == 401
        assert router.ask("/generate", body, bearer(OLD))[0] == 401
        found = [router.ask("/generate", body, bearer(KEY))[0] for _ in range(2)]
        assert found == [200, 429]
        assert router.ask("/generate", body, bearer(OTHER))[0] == 200
        write_keys(path)  # without a limit
        until(lambda: router.ask("/generate", body, bearer(KEY))[0] == 200, what="the new limits")
        path.write_text('{"tenants": {}, "keys": [{"id": "x", "sha256": "' + SECRETS[3] + 'f", "tenant": "a"}]}')
        until(lambda: "left as they were" in router.log, what="a line on the broken file")
        assert router.ask("/generate", body, bearer(KEY))[0] == 200
        pages = [
            router.ask(page, headers=bearer("admin"))[1].decode() for page in ("/pla/state", "/metrics", "/workers")
        ]
        for text in (router.log, *pages):
            assert not any(secret in text for secret in SECRETS)
        assert router.stop() == 0
