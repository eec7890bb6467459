"""Ports for servers on this machine, and its address."""

from __future__ import annotations

import random
import socket

from pla_sglang.common.errors import PlaError

# Below the range from which Linux takes ports of outgoing connections, so that none of those gets in between.
PORT_RANGE = (20_000, 32_000)

_ports_given: set[int] = set()


def free_port() -> int:
    """A free TCP port that this process has not returned before. Raises PlaError where there is none."""
    for _ in range(1000):
        port = random.randrange(*PORT_RANGE)
        if port in _ports_given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _ports_given.add(port)
        return port
    raise PlaError(f"no free port between {PORT_RANGE[0]} and {PORT_RANGE[1]}")
