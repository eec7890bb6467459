"""Where the ranks of an instance meet: torch's store listens at every address of the machine, whatever it is told.

So a scheme of our own makes the same store on a socket that is bound already. Ranks of one machine only.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pla_sglang.plugin.config import read_single_address

THEIRS, SCHEME = "tcp", "pla-tcp"
PATIENCE = timedelta(minutes=30)  # torch's own


def keep_to_host(method: str, args: Any) -> str | None:
    """The method of meeting at ``--host`` alone; None: the host's stays, as it names no single address of one machine.

    Args:
        method: the host's, such as ``tcp://127.0.0.1:29500``.
        args: the host's arguments.
    """
    if args.nnodes > 1 or args.dist_init_addr or read_single_address(args.host) is None:
        return None
    scheme, _, rest = method.partition("://")
    if scheme != THEIRS:
        return None
    _register_scheme()
    return f"{SCHEME}://{rest}"


def _register_scheme() -> None:
    from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

    if SCHEME not in _rendezvous_handlers:
        register_rendezvous_handler(SCHEME, meet)


def meet(url: str, timeout: timedelta = PATIENCE, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """As torch's handler of ``tcp``; the first rank brings the socket."""
    from torch.distributed import TCPStore

    parts = urlsplit(url)
    query = {name: int(values[0]) for name, values in parse_qs(parts.query).items()}
    rank, ranks, host, port = query["rank"], query["world_size"], parts.hostname or "", parts.port or 0
    bound: dict[str, Any] = {}
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound["master_listen_fd"] = socket.create_server((host, port), family=family).detach()
    store = TCPStore(host, port, ranks, is_master=rank == 0, timeout=timeout, multi_tenant=True, **bound)
    yield store, rank, ranks
    raise RuntimeError("ranks meet once")
