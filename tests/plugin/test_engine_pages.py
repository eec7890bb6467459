"""Pages in a browser at routes of ours: which of them may make it send something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.testclient import TestClient

from pla_sglang.common.origins import is_foreign_page, is_unsafe_name
from pla_sglang.plugin.engine.pages import PageGuard

OWN = "http://127.0.0.1:30000"
PAGES = [
    # origin, host, foreign, unsafe without a key
    (None, "127.0.0.1:30000", False, False),
    (None, None, False, False),
    (OWN, "127.0.0.1:30000", False, False),
    ("HTTP://LOCALHOST:30000", "localhost:30000", False, False),
    ("http://10.0.0.7:30000", "10.0.0.7:30000", False, False),
    ("http://[::1]:30000", "[::1]:30000", False, False),
    ("http://node-7:30000", "node-7:30000", False, False),  # where it listens
    ("http://evil.example", "127.0.0.1:30000", True, False),
    ("http://evil.example:30000", "evil.example:30000", False, True),  # its name leads here
    ("http://127.0.0.1:30001", "127.0.0.1:30000", True, False),
    ("https://127.0.0.1", "127.0.0.1:30000", True, False),
    ("null", "127.0.0.1:30000", True, False),
    ("", "127.0.0.1:30000", True, False),
    ("", None, False, True),  # it says nothing that could be trusted
    ("http://127.0.0.1:30000.evil.example", "127.0.0.1:30000", True, False),
]


@pytest.mark.parametrize(("origin", "host", "foreign", "unsafe"), PAGES)
def test_what_a_page_says_of_itself(origin: str | None, host: str | None, *, foreign: bool, unsafe: bool) -> None:
    assert is_foreign_page(origin, host) is foreign
    assert is_unsafe_name(origin, host, "node-7") is unsafe


def app_with(*, key: str | None) -> TestClient:
    app = FastAPI()
    for path in ("/pla/state", "/generate"):
        app.add_api_route(path, lambda: {"served": True}, methods=["GET", "POST"])
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(PageGuard, read_args=lambda: SimpleNamespace(host="node-7", api_key=None, admin_api_key=key))
    return TestClient(app, base_url=OWN)


@pytest.mark.parametrize(("origin", "host", "foreign", "unsafe"), [page for page in PAGES if page[1] is not None])
@pytest.mark.parametrize("key", [None, "admin"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_an_engine_serves_its_own_pages_alone(
    method: str, key: str | None, origin: str | None, host: str, *, foreign: bool, unsafe: bool
) -> None:
    """A preflight too: SGLang answers it with leave for all."""
    headers = {"host": host, "access-control-request-method": "POST", "content-type": "text/plain"}
    if origin is not None:
        headers["origin"] = origin
    refused = foreign or (unsafe and key is None)
    answer: Any = app_with(key=key).request(method, "/pla/state", headers=headers)
    assert (answer.status_code == 403) is refused
    assert not (refused and "access-control-allow-origin" in answer.headers)
    assert app_with(key=key).request(method, "/generate", headers=headers).status_code != 403, (
        "SGLang's routes are its own"
    )


@pytest.mark.parametrize("path", ["/root/pla/state", "/pla%2Fstate", "/pla/nothing"])
def test_no_other_spelling_of_a_path_leads_around_it(path: str) -> None:
    client = app_with(key=None)
    client.app.root_path = "/root"  # type: ignore[attr-defined]
    answer = client.post(path, headers={"origin": "http://evil.example"})
    assert answer.status_code in (403, 404)
