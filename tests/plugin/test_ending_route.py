"""``/pla/ending``: an engine of ours says that it was told to end, through SGLang's own app and signal handler."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager

from pla_sglang.plugin.engine import routes

PATHS = {"/pla/state", "/pla/ending"}


@pytest.mark.parametrize("add", [routes.add_routes, routes.add_state_route])
def test_it_is_said_from_the_signal_on(add: object, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(gracefully_exit=False)
    app = FastAPI()
    app.router.routes = copy.copy(http_server.app.router.routes)
    monkeypatch.setattr(http_server, "app", app)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    add()  # type: ignore[operator]
    assert {getattr(route, "path", "") for route in app.router.routes} >= PATHS
    client = TestClient(app)
    assert client.get("/pla/ending").json() == {"ending": False}
    SignalHandler(manager).sigterm_handler()  # type: ignore[arg-type]
    assert client.get("/pla/ending").json() == {"ending": True}


def test_the_host_ends_by_the_same_word() -> None:
    """Where it drains under another name, this route would say no for ever."""
    assert "gracefully_exit" in TokenizerManager.sigterm_watchdog.__code__.co_names
