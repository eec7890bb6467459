"""What mock and client agree on: how a request names its answer, and how an event carries its time.

Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import json
import random
import re

PADDING = "x" * 160  # an event is about as long as one of SGLang's
_EVENTS = re.compile(rb'"max_new_tokens":\s*(\d+)')
_GAP = re.compile(rb'"temperature":\s*([0-9.eE+-]+)')
_SENT = re.compile(rb'"t":(\d+)')
EDGE_BYTES = 1500  # at which end of a long body the parameters stand, depends on who wrote it last


def request_body(*, events: int, gap_s: float, stream: bool, tokens: int = 0, seed: int = 1) -> bytes:
    """A /generate body. The mock reads the number of events, and their distance from ``temperature``."""
    params = {"max_new_tokens": events, "temperature": gap_s}
    rng = random.Random(seed)
    prompt = {"input_ids": [rng.randrange(1000, 32_000) for _ in range(tokens)]} if tokens else {"text": "hello there"}
    return json.dumps({**prompt, "sampling_params": params, "stream": stream}).encode()


def edges(body: bytes) -> bytes:
    """Start and end of a long body; a short one as it is."""
    return body if len(body) <= 2 * EDGE_BYTES else body[:EDGE_BYTES] + body[-EDGE_BYTES:]


def wishes(body: bytes) -> tuple[int, float, bool]:
    """Events, seconds between two, whether as a stream."""
    edge = edges(body)
    events, gap = _EVENTS.search(edge), _GAP.search(edge)
    stream = b'"stream":true' in edge or b'"stream": true' in edge
    return (int(events[1]) if events else 1), (float(gap[1]) if gap else 0.0), stream


def event(now_ns: int) -> bytes:
    return b'data: {"text":"%s","t":%d,"meta_info":{"id":"x","finish_reason":null}}\n\n' % (PADDING.encode(), now_ns)


def sent_ns(data: bytes) -> list[int]:
    """Send times of the events in ``data``."""
    return [int(found) for found in _SENT.findall(data)]
