"""Which addresses may become a worker: those that name a machine, and a process that is no worker yet."""

from __future__ import annotations

import time

import pytest
from aiohttp import ClientSession, web
from support.router_scene import scene

from pla_sglang.fleet.router.control.workers.discovery import parse_url
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.wire import messages as m

LONG = "a" * 63
GOOD = {
    "http://host:80": "http://host:80",
    "http://HOST.example.:80/": "http://host.example.:80",
    "http://my_service-1.ns:8000": "http://my_service-1.ns:8000",
    f"http://{LONG}.{LONG}:1": f"http://{LONG}.{LONG}:1",
    "http://10.0.0.3:30000/": "http://10.0.0.3:30000",
    "http://[::1]:1": "http://[::1]:1",
    "http://[0:0::1]:1": "http://[::1]:1",
    "http://[::ffff:127.0.0.1]:1": "http://127.0.0.1:1",
    "https://A:1/": "https://a:1",
    "https://[::1]:1": "https://[::1]:1",
}
BAD = [
    *("http://..:80", "http://.:80", "http://a..b:80", "http://-a:80", "http://a-:80", f"http://{LONG}a:80"),
    *("http://a b:80", "http://a\0b:80", "http://%00:80", "http://a%20b:80", "http://é:80", "http://１２７.0.0.1:80"),
    *("http://0x7f.1:80", "http://127.1:80", "http://2130706433:80", "http://1.2.3.256:80", "http://1.2.3.4.:80"),
    *("http://0.0.0.0:80", "http://[::]:80", "http://[fe80::1%25eth0]:80", f"http://{'a.' * 127}a:80"),
    *(
        "ftp://a:80",
        "https://a",
        "http://a",
        "http://a:0",
        "http://a:65536",
        "http://u@a:80",
        "http://a:80/x",
        "http://a:80?x",
        "a:80",
        "http://:8",
    ),
]


@pytest.mark.parametrize("url", GOOD)
def test_an_address_has_one_form(url: str) -> None:
    assert parse_url(url).url == GOOD[url]


@pytest.mark.parametrize("url", BAD)
def test_what_names_no_machine(url: str) -> None:
    with pytest.raises(WorkerError, match=r"HOST|zone|listens") as caught:
        parse_url(url)
    assert caught.value.status == 400


async def test_one_process_is_one_worker() -> None:
    """Under another name of its machine it stays outside, and says why; until the first one has gone."""
    async with scene(["null"]) as one:
        other_name = one.instances[0].url.replace("127.0.0.1", "localhost")
        assert one.admin("POST", "/workers", {"url": other_name})[0] == 202
        await one.until(lambda: "worker 0 already" in one.admin("GET", "/workers/1")[1]["detail"])
        assert one.admin("GET", "/workers/1")[1]["state"] == "starting"
        assert one.admin("DELETE", "/workers/0")[0] == 202
        await one.until(lambda: one.admin("GET", "/workers/1")[1]["state"] == "ready")


async def test_a_router_is_no_worker_of_itself() -> None:
    """Asked what it is, it answers as one of its instances."""
    async with scene(["null"]) as one, ClientSession() as http:

        async def pass_on(request: web.Request) -> web.Response:
            async with http.get(one.instances[0].url + request.path) as answer:
                return web.Response(status=answer.status, body=await answer.read())

        front = web.Application()
        front.router.add_get("/{path:.*}", pass_on)
        runner = web.AppRunner(front, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        assert one.admin("POST", "/workers", {"url": f"http://127.0.0.1:{port}"})[0] == 202
        await one.until(lambda: "worker 0 already" in one.admin("GET", "/workers/1")[1]["detail"])
        for number in range(6):
            answer = one.assign(f"r{number}")
            assert answer.decode == 0
            one.ended(f"r{number}")
        await runner.cleanup()


async def test_names_of_prompts_are_used_once_at_a_time() -> None:
    """Also where the two requests come by different relays."""
    async with scene(["null"]) as one:
        body = {"text": ["a", "b"]}
        one.assign("batch", body, rids=("s1", "s2"), prompts=2)
        for rid, rids in (("s2", ()), ("other", ("s3", "s1")), ("more", ("batch",))):
            refused = one.be_refused(rid, body, rids=rids)
            assert refused.status == 409
            one.ended(rid, m.Outcome.REFUSED)
        audit = one.plane.dispatcher.ledger.audit(time.monotonic())
        assert (audit.balanced, audit.opened) == (True, 1)
        one.ended("batch")
        one.assign("s2", body)
        one.ended("s2")
        one.assert_at_rest()
