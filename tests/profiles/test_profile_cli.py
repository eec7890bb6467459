"""The profile fitter against a small server in this process that takes known times."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pla_sglang import profile
from pla_sglang.profiles import load_profile
from pla_sglang.profiles.step import Coverage

PREFILL_S = 0.04
STEP_S = 0.02


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(PREFILL_S + len(body["input_ids"]) * 1e-4)
    for _ in range(body["sampling_params"]["max_new_tokens"]):
        await response.write(b"data: " + json.dumps({"output_ids": [1]}).encode() + b"\n\n")
        await asyncio.sleep(STEP_S)
    await response.write(b"data: [DONE]\n\n")
    return response


async def info(request: web.Request) -> web.Response:
    return web.json_response({"model_path": "fake", "max_total_num_tokens": 777, "tp_size": 2})


@pytest.fixture
def server() -> Iterator[str]:
    """Its address. The server runs on a thread of its own, as the fitter has an event loop of its own."""
    started, stop = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/server_info", info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append("http://{}:{}".format(*runner.addresses[0][:2]))
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    yield address[0]
    stop.set()
    thread.join()


def test_a_server_is_measured_and_fitted(server: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    arguments = ["--url", server, "--name", "mine", "--out", str(out), "--time-scale", "2"]
    sizes = ["--prefill-tokens", "10,200,400,800", "--decode-batches", "1,2", "--decode-contexts", "10,20"]
    assert profile.main([*arguments, *sizes]) == 0
    fitted = load_profile(out)
    assert fitted.name == "mine"
    assert fitted.kv_capacity_tokens == 777
    assert fitted.coverage == Coverage((10, 800), (10, 800), (1, 2), (10, 20), (10, 40))
    assert fitted.gpus == 2
    # Sleeps only ever take longer.
    assert PREFILL_S / 2 < fitted.prefill_s(10, 100) < PREFILL_S
    assert fitted.prefill_s(800, 640_000) > fitted.prefill_s(10, 100) + 0.03
    assert STEP_S / 2 < fitted.decode_s(1, 10) < STEP_S


def test_no_server_and_bad_lists_are_plain_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--name", "x", "--out", str(tmp_path / "x.json")]
    assert profile.main(["--url", "http://127.0.0.1:9", *out]) == 1
    assert "no SGLang server answers" in capsys.readouterr().err
    for bad, message in (
        (["--decode-batches", "1,x"], "--decode-batches 'x' is not a whole number; allowed: at least 1"),
        (["--decode-batches", "0"], "--decode-batches 0 is out of range; allowed: at least 1"),
        (["--time-scale", "0"], "--time-scale 0 is out of range; allowed: above 0"),
    ):
        assert profile.main(["--url", "http://127.0.0.1:9", *out, *bad]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    assert profile.main(out) == 2
    assert capsys.readouterr().err == "error: --url is needed\n"
