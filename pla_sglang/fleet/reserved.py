"""What of a request only a router may set, and the key by which a stateless instance knows its router.

The router refuses these from its clients. A stateless instance refuses them from whoever does not hold the key.
"""

from __future__ import annotations

import secrets

from pla_sglang.common.checks import Pattern

ROUTER_KEY_HEADER = "x-pla-router-key"
ROUTER_KEY_FORM = Pattern(r"[\x21-\x7e]{16,128}", "16 to 128 visible ASCII characters")
RESERVED_PARAMS = "pla_"  # members of custom_params that start so steer instances
PARAMS_OF_USERS = frozenset({"pla_slo_ttft_ms"})


def make_router_key() -> str:
    """A new one, for one start of a router."""
    return secrets.token_hex(16)


def is_reserved_param(name: str) -> bool:
    """True if only a router may set this member of custom_params."""
    return name.startswith(RESERVED_PARAMS) and name not in PARAMS_OF_USERS


def describe_reserved(name: str) -> str:
    """The refusal of a field or member that only a router may set, in one wording for instances and the router."""
    return f"{name} is set by the router and may not be sent"
