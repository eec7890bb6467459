"""The page of ``assets``: one HTML file that loads nothing, served by the router or written from a recording.

Names of instances come from outside and are no markup anywhere: they are in JSON, which cannot end the element that it
stands in, and the script writes them as text. The policy below allows the one script and the one style of the page, by
their hashes, so that the page is the same at every request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from pla_sglang.common.legend.colours import CLASS_COLOURS, PLAN_COLOURS, ROLE_COLOURS, STATE_COLOURS
from pla_sglang.common.legend.explanations import FLEET, MOVE, PLAN_FIGURES, UNKNOWN, WORKER, WORKER_PREFIX
from pla_sglang.common.legend.pages import encode_json, read_base_style

CONTENT_TYPE = "text/html; charset=utf-8"


@functools.cache
def render_live() -> bytes:
    """The page that asks the router for its data."""
    return _fill_template({}, _describe_policy(live=True)).encode()


def render_recorded(document: Mapping[str, Any]) -> str:
    """The page with all of its data: ``FleetHistory.to_document`` and what the header of the page says."""
    return _fill_template({"data": encode_json(document)}, _describe_policy(live=False))


@functools.cache
def live_headers() -> tuple[tuple[str, str], ...]:
    """Headers of the answer with the live page."""
    return (
        ("content-security-policy", f"{_describe_policy(live=True)}; frame-ancestors 'none'"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "private, max-age=60"),
    )


def _describe_policy(*, live: bool) -> str:
    """Content-Security-Policy. A live page talks to where it came from, a written one to nobody."""
    script, style = (_hash_text(text) for text in (_read_script(), _read_style()))
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; img-src data:; script-src '{script}'; style-src '{style}'; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash_text(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _read_asset(name: str) -> str:
    return resources.files("pla_sglang.fleet.viewer").joinpath("assets", name).read_text(encoding="utf-8")


def _read_style() -> str:
    return read_base_style() + _read_asset("view.css")


def _read_script() -> str:
    return "".join(map(_read_asset, ("fleet.js", "panels.js", "planner.js", "tiles.js", "view.js")))


def _fill_template(texts: Mapping[str, str], policy: str) -> str:
    """One pass over the parts of the template, so that no text of one part is taken for the place of another."""
    filled = {
        "policy": policy,
        "style": _read_style(),
        "script": _read_script(),
        "legend": encode_json(_describe_legend()),
        "data": "null",
        **texts,
    }
    parts = _read_asset("view.html").split("@@")  # text, name, text, name, ..., text
    return "".join(filled[part] if place % 2 else part for place, part in enumerate(parts))


def _describe_legend() -> dict[str, Any]:
    reasons = {**FLEET, **MOVE, **{f"{WORKER_PREFIX}{name}": text for name, text in WORKER.items()}}
    return {
        "roles": {role.value: colour for role, colour in ROLE_COLOURS.items()},
        "states": dict(STATE_COLOURS),
        "classes": dict(CLASS_COLOURS),
        "plan": dict(PLAN_COLOURS),
        "figures": dict(PLAN_FIGURES),
        "reasons": reasons,
        "unknown": UNKNOWN,
    }
