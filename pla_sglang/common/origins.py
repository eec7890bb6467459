"""Pages in a browser: which of them may make it send something to a server of ours. For the router and for engines.

A browser names the page that makes it send a request (``Origin``). Without keys, any page that somebody looks at could
steer a server otherwise. Headers are texts here; None: the request has none.
"""

from __future__ import annotations

import ipaddress


def is_foreign_page(origin: str | None, host: str | None) -> bool:
    """True if a page of another address than the server's own has made the browser send a request.

    Args:
        host: the header: under which address the request was sent.
    """
    return origin is not None and origin.lower().partition("://")[2] != (host or "").lower()


def is_unsafe_name(origin: str | None, host: str | None, own: str) -> bool:
    """True if a page has named the server by a name that somebody else may have made lead to it (DNS rebinding): then
    the page's origin is the server's address too. An IP address, ``localhost``, or ``own`` is safe: where it listens.
    """
    if origin is None:
        return False
    name = (host or "").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in ("localhost", own.lower()):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False
