"""TLS of a relay: its clients, its instances, and files that change or are not what they should be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang, Script
from support.certificates import Authority, client_context, server_context
from support.relays import Setting, read_answer, request_bytes, serving, setting
from support.router_process import router_process
from support.serving import until

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.tls import SOON_S, ClientTls, TlsContext, WorkerTls, read_expiry
from pla_sglang.launch_router import main

ASK = {"text": "hello"}
STREAM = ASK | {"stream": True}
DAY_S = 86_400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def connect(here: Setting, tls: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", here.relay.listener.port, ssl=tls)


def serial_shown(writer: asyncio.StreamWriter) -> Any:
    return writer.get_extra_info("peercert")["serialNumber"]


def failures(here: Setting) -> dict[str, float]:
    values = here.relay.context.counters.values
    return {name.split('"')[1]: count for name, count in values.items() if name.startswith("tls_failures_total")}


async def test_clients_come_by_https_on_one_connection(authority: Authority) -> None:
    config = RelayConfig(tls=ClientTls(*authority.issue("router")))
    long = {"text": "x" * 400_000}
    async with setting("unified", config=config, scripts={0: Script(events=300)}) as here:
        reader, writer = await connect(here, client_context(authority.ca))
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        for body in (ASK, STREAM, long, STREAM):
            writer.write(request_bytes(body))
            answer = await read_answer(reader)
            assert answer.status == 200
            assert len(answer.events) == (301 if body is STREAM else 0)
        assert here.relay.read_gauges()["client_connections"] == 1
        writer.close()
        await here.until(lambda: here.relay.read_gauges()["client_connections"] == 0)


async def test_a_refused_head_closes_behind_its_answer(authority: Authority) -> None:
    """TLS connections cannot be half closed."""
    async with setting("unified", config=RelayConfig(tls=ClientTls(*authority.issue("router")))) as here:
        reader, writer = await connect(here, client_context(authority.ca))
        writer.write(b"nonsense\r\n\r\n")
        assert b" 400 " in await asyncio.wait_for(reader.read(), 10)
        writer.close()


async def test_only_tls_1_2_and_later(authority: Authority) -> None:
    old = client_context(authority.ca)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with setting("unified", config=RelayConfig(tls=ClientTls(*authority.issue("router")))) as here:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(here, old)
        await here.until(lambda: failures(here) == {"protocol": 1})


async def test_clients_must_show_a_certificate_of_the_authority(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    tls = ClientTls(*authority.issue("router"), authority.ca)
    async with setting("unified", config=RelayConfig(tls=tls)) as here:
        for own in (None, stranger.issue("client"), authority.issue("late", days=-1)):
            with contextlib.suppress(ssl.SSLError, ConnectionError):  # with TLS 1.3 a client hears of it late
                reader, writer = await connect(here, client_context(authority.ca, own))
                writer.write(request_bytes(ASK))
                assert await reader.read() == b""
        await here.until(lambda: failures(here) == {"certificate": 3})
        assert here.instances[0].requests == []
        reader, writer = await connect(here, client_context(authority.ca, authority.issue("friend")))
        writer.write(request_bytes(ASK))
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_plain_http_to_a_port_of_tls_and_the_other_way_round(authority: Authority) -> None:
    async with setting("unified", config=RelayConfig(tls=ClientTls(*authority.issue("router")))) as here:
        answer = await here.ask(ASK)
        assert (answer.status, answer.error["type"]) == (400, "plain_http")
        await here.until(lambda: failures(here) == {"plain_http": 1})
        await here.until(lambda: len(here.relay.listener._tls or ()) == 0)
    async with setting("unified") as here:
        with pytest.raises(ssl.SSLError):
            await asyncio.wait_for(connect(here, client_context(authority.ca)), 5)
        await here.until(lambda: here.relay.read_gauges()["client_connections"] == 0)
        assert here.relay.context.counters.values['bad_requests_total{reason="tls"}'] == 1


async def test_handshakes_have_a_time_limit_count_as_connections_and_block_nobody(authority: Authority) -> None:
    config = RelayConfig(tls=ClientTls(*authority.issue("router")), head_timeout_s=1.0, max_connections=20)
    async with setting("unified", config=config) as here:
        port = here.relay.listener.port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        begun = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        for _, writer in begun:
            writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a record
        await here.until(lambda: here.relay.listener._is_full() or len(here.relay.listener._tls or ()) == 19)
        reader, writer = await connect(here, client_context(authority.ca))
        writer.write(request_bytes(ASK))
        assert (await read_answer(reader)).status == 200
        refused, other = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(refused.read(), 5) == b""
        for slow, _ in [*silent, *begun]:
            assert await asyncio.wait_for(slow.read(), 10) == b""
        await here.until(lambda: sum(failures(here).values()) == 19)
        for _, one in [*silent, *begun, (None, other), (None, writer)]:
            one.close()
        await here.until(lambda: not here.relay.read_gauges()["client_connections"])


async def test_the_end_of_the_relay_cuts_handshakes(authority: Authority) -> None:
    async with setting("unified", config=RelayConfig(tls=ClientTls(*authority.issue("router")))) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.relay.listener.port)
        await here.until(lambda: len(here.relay.listener._tls or ()) == 1)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_new_connections_get_the_new_certificate(authority: Authority, caplog: Any) -> None:
    cert, key = authority.issue("router")
    async with setting("unified", config=RelayConfig(tls=ClientTls(cert, key))) as here:
        trusting = client_context(authority.ca)
        old_reader, old_writer = await connect(here, trusting)
        kept = serial_shown(old_writer)
        cert.write_text("no certificate")
        tls = here.relay.context.client_tls
        assert tls is not None
        tls.follow_files(time.time())
        tls.follow_files(time.time())
        assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
            f"TLS is left as it was: --tls-cert-path {cert} has no certificate; allowed: PEM"
        ]
        _, writer = await connect(here, trusting)
        assert serial_shown(writer) == kept
        writer.close()
        authority.issue("router")
        await here.until(lambda: tls.expires_at_s is not None and not cert.read_text().startswith("no"))
        tls.follow_files(time.time())
        _, writer = await connect(here, trusting)
        assert serial_shown(writer) != kept
        writer.close()
        old_writer.write(request_bytes(ASK))
        assert (await read_answer(old_reader)).status == 200
        old_writer.close()


def test_a_certificate_that_expires_soon_is_told_once_and_once_more_at_its_end(
    authority: Authority, caplog: Any
) -> None:
    tls, now_s = TlsContext(ClientTls(*authority.issue("router", days=30)), now_s=time.time()), time.time()
    assert tls.left_s(now_s) == pytest.approx(30 * DAY_S, abs=60)
    for later_s in (0.0, 30 * DAY_S - SOON_S + 60, 20 * DAY_S, 31 * DAY_S, 32 * DAY_S):
        tls.follow_files(now_s + later_s)
    assert [one.levelname for one in caplog.records] == ["WARNING", "ERROR"]


@pytest.mark.parametrize("end", ["2031-01-01", "2049-12-31", "2050-01-01", "2100-06-01"])
def test_the_end_of_a_certificate_is_read_in_both_forms(end: str, authority: Authority) -> None:
    """Up to 2049 the year has two digits."""
    wanted_s = time.mktime(time.strptime(end, "%Y-%m-%d"))
    cert, _ = authority.issue("router", days=(wanted_s - time.time()) / DAY_S)
    assert read_expiry(cert.read_bytes()) == pytest.approx(wanted_s, abs=60)


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_has_no_end(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"no certificate|damaged"):
        read_expiry(text)


Break = Callable[[Authority, Path, Path], list[str]]


def _expired(authority: Authority, cert: Path, key: Path) -> list[str]:
    authority.issue("router", days=-2)
    return ["--tls-cert-path", str(cert), "--tls-key-path", str(key)]


def _foreign_key(authority: Authority, cert: Path, key: Path) -> list[str]:
    return ["--tls-cert-path", str(cert), "--tls-key-path", str(authority.issue("other")[1])]


def _with_passphrase(authority: Authority, cert: Path, key: Path) -> list[str]:
    authority.issue("router", passphrase=b"secret")
    return ["--tls-cert-path", str(cert), "--tls-key-path", str(key)]


def _no_pem(authority: Authority, cert: Path, key: Path) -> list[str]:
    key.write_text("nothing")
    return ["--tls-cert-path", str(cert), "--tls-key-path", str(key)]


def _bad_ca(authority: Authority, cert: Path, key: Path) -> list[str]:
    authority.ca.write_text("nothing")
    return ["--tls-cert-path", str(cert), "--tls-key-path", str(key), "--tls-client-ca", str(authority.ca)]


@pytest.mark.parametrize(
    ("break_files", "line"),
    [
        (_expired, "--tls-cert-path {cert} has expired: "),
        (_foreign_key, "--tls-key-path {folder}/other.key is not the key of --tls-cert-path {cert}\n"),
        (_with_passphrase, "--tls-key-path {key} has a passphrase; allowed: a key without one\n"),
        (_no_pem, "--tls-key-path {key} cannot be used with {cert}"),
        (_bad_ca, "--tls-client-ca {folder}/authority.pem has no certificate; allowed: PEM\n"),
        (lambda *_: ["--tls-cert-path", "x"], "--tls-cert-path needs --tls-key-path\n"),
        (lambda *_: ["--worker-key-path", "x"], "--worker-key-path needs --worker-cert-path\n"),
        (lambda *_: ["--tls-client-ca", "x"], "--tls-client-ca needs --tls-cert-path\n"),
        (lambda *_: ["--worker-ca", "/no/file"], "--worker-ca /no/file: No such file or directory\n"),
        (lambda *_: ["--worker-ca", "/"], "--worker-ca /: Is a directory\n"),
    ],
)
def test_files_that_cannot_be_used_end_the_start_with_one_line(
    break_files: Break, line: str, authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = authority.issue("router")
    assert main(break_files(authority, cert, key)) == EXIT_BAD_ARGUMENTS
    said = capsys.readouterr().err
    assert said.startswith("error: " + line.format(cert=cert, key=key, folder=tmp_path))
    assert said.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_key_that_may_not_be_read_is_named(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = authority.issue("router")
    key.chmod(0)
    assert main(["--tls-cert-path", str(cert), "--tls-key-path", str(key)]) == EXIT_BAD_ARGUMENTS
    assert capsys.readouterr().err == f"error: --tls-key-path {key}: Permission denied\n"


def test_a_key_that_everybody_may_read_is_warned_of(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = authority.issue("router", days=-1)
    key.chmod(0o644)
    main(["--tls-cert-path", str(cert), "--tls-key-path", str(key)])
    assert f"warning: --tls-key-path {key} can be read by every user" in capsys.readouterr().err


async def test_instances_are_reached_by_https(authority: Authority) -> None:
    """The instance asks for a certificate too."""
    tls = server_context(authority.issue("instance"), authority.ca)
    own = WorkerTls(*authority.issue("router"), authority.ca)
    instance = FakeSglang(tls=tls, script=Script(events=50))
    async with serving(Setting, [instance], {}, RelayConfig(worker_tls=own)) as here:
        for body in (ASK, STREAM, STREAM):
            assert (await here.ask(body)).status == 200
        assert instance.connections == 1
        instance.script.gap_s = 0.05
        _, writer = await here.connect()
        writer.write(request_bytes(STREAM))
        await here.until(lambda: instance.held)
        writer.close()
        await here.until(lambda: instance.aborted)


async def test_an_instance_that_nobody_vouches_for_gets_no_request(authority: Authority, tmp_path: Path) -> None:
    tls = server_context(Authority(tmp_path, "stranger").issue("instance"))
    other_host = server_context(authority.issue("elsewhere", host="10.0.0.1"))
    for shown in (tls, other_host):
        instance = FakeSglang(tls=shown)
        config = RelayConfig(worker_tls=WorkerTls(None, None, authority.ca))
        async with serving(Setting, [instance], {}, config) as here:
            answer = await here.ask(ASK)
            assert (answer.status, answer.error["type"]) == (502, "upstream_unreachable")
            assert "could be reached: TLS: " in answer.error["message"]
            assert instance.requests == []


@pytest.mark.parametrize("relays", ["0", "2"])
def test_a_router_of_several_processes_speaks_tls_on_both_sides(relays: str, authority: Authority) -> None:
    """Both sides show a certificate. A new one is used without a restart; a relay that starts again uses it too."""
    (cert, key), own, ca = authority.issue("router"), authority.issue("client"), str(authority.ca)
    worker_cert, worker_key = authority.issue("router-to-instances")
    arguments = ["--relay-workers", relays, "--tls-cert-path", str(cert), "--tls-key-path", str(key)]
    arguments += ["--tls-client-ca", ca, "--worker-ca", ca]
    arguments += ["--worker-cert-path", str(worker_cert), "--worker-key-path", str(worker_key)]
    tls = client_context(authority.ca, own)
    instance = FakeSglang(tls=server_context(authority.issue("instance"), authority.ca))
    with router_process([instance], arguments, authority.folder, tls=tls) as router:
        assert "router on https://127.0.0.1:" in router.log
        assert router.ask("/generate", b'{"text": "hello"}')[0] == 200
        gauge = rb'pla_router_relay_certificate_expires_seconds\{relay="0",shown_to="(\w+)"\} 7\.7'
        until(lambda: re.findall(gauge, router.ask("/metrics")[1]) == [b"clients", b"instances"], what="the gauges")
        before = {shown_serial(router.port, tls) for _ in range(10)}
        authority.issue("router")
        until(lambda: before.isdisjoint({shown_serial(router.port, tls) for _ in range(10)}), what="the new one")
        assert router.ask("/generate", b'{"text": "hello"}')[0] == 200
        assert "Traceback" not in router.log
        assert router.stop() == 0


def shown_serial(port: int, tls: ssl.SSLContext) -> Any:
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        shown: Any = secure.getpeercert()
    return shown["serialNumber"]
