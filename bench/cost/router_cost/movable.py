"""Checks that the streams of an arm can move. An arm that measured others without a word would say nothing."""

from __future__ import annotations

import time

from bench.check.leftovers import read_series
from bench.cost.router_cost.client import HELD_BODY, Client
from bench.harness.bench import BenchError
from pla_sglang.testing.server import fetch

STREAMS, HOLD_S = 8, 3.0  # a relay reports every second
LEAST_ID_BYTES = 4096  # that a relay counts for the token ids of a stream
POLL_S = 0.1
KEPT, UNMOVABLE = "pla_router_relay_kept_bytes", "pla_router_relay_unmovable_total"


def check_movable(port: int, client: Client) -> None:
    """A few streams are held, and the router is asked what it keeps of them. That no comment comes through, the client
    checks at every event.

    Raises BenchError: it does not keep their token ids, or has met a stream that cannot move; ServerError.
    """
    common = {"port": port, "duration_s": HOLD_S, "seed": 0, "quickack": False}
    client.begin({"kind": "held", "connections": STREAMS, "body": HELD_BODY, **common})
    opened, end_s = client.read_line(), time.monotonic() + HOLD_S
    kept_bytes, unmovable = read_kept(port)
    while kept_bytes < STREAMS * LEAST_ID_BYTES and time.monotonic() < end_s:
        time.sleep(POLL_S)
        kept_bytes, unmovable = read_kept(port)
    held = client.read_line() if "open" in opened else opened
    if held["errors"] or unmovable or kept_bytes < STREAMS * LEAST_ID_BYTES:
        found = f"{kept_bytes:.0f} bytes kept of {STREAMS} streams, {held['errors']} errors {held['error']!r}"
        raise BenchError(f"streams that are to be movable are not: {found}, not movable: {unmovable}")


def read_kept(port: int) -> tuple[float, dict[str, float]]:
    """Bytes that the relays keep of bodies and token ids, and streams that could not move so far, by reason."""
    series = read_series(fetch(f"http://127.0.0.1:{port}/metrics"))
    named = [(name, name.partition("{")[0], value) for name, value in series.items()]
    kept_bytes = sum(value for _, family, value in named if family == KEPT)
    return kept_bytes, {name: value for name, family, value in named if family == UNMOVABLE and value}
