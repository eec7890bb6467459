"""Who may send legs: whoever holds the key of a router that told this instance its peers.

An instance that was told no key takes legs from anybody, so that SGLang's own router works with it unchanged.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.fleet.reserved import ROUTER_KEY_FORM, is_reserved_param

MEMBER = "router_key"  # of the body of ``POST /pla/peers``
KEEP_S = 600.0  # a router tells its key with each list of peers, every 10 to 30 s
MAX_KEYS = 16
REST_S = 60.0  # a key that was neither told nor shown for so long may make room for a new one
LEG_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")


class KeysFullError(PlaError):
    """There is no room for the key of another router."""


class RouterKeys:
    """The keys that were told. Several routers may stand before one instance, and a router that restarts has a new key.

    A key lapses when it was not told for ``KEEP_S``, except for the last one: an instance that has become closed to
    others stays so. Where ``MAX_KEYS`` are kept, a new one takes the place of the one that has rested longest, if that
    is ``REST_S`` and more: no router that is at work loses its place to keys that somebody makes up, and one that was
    started again gets in as soon as a key rests, its own old one at the latest.

    Args:
        now_s: a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._told_s: dict[str, float] = {}  # when each was told last; the one told last comes last
        self._shown_s: dict[str, float] = {}  # when a request brought it last

    def add_key(self, key: str) -> None:
        """Raises KeysFullError, and changes nothing then."""
        now_s = self._now_s()
        kept = {old: told_s for old, told_s in self._told_s.items() if old != key and now_s - told_s < KEEP_S}
        if len(kept) >= MAX_KEYS:
            active_s = {old: max(told_s, self._shown_s.get(old, told_s)) for old, told_s in kept.items()}
            resting = min(active_s, key=lambda old: active_s[old])
            if now_s - active_s[resting] < REST_S:
                raise KeysFullError(f"{MAX_KEYS} routers have told their keys, and are at work; try again later")
            del kept[resting]
        self._told_s = {**kept, key: now_s}
        self._shown_s = {old: shown_s for old, shown_s in self._shown_s.items() if old in self._told_s}

    def admits(self, shown: str | None) -> bool:
        """Tells whether a request with this header (None: without it) may say what only routers may say."""
        if not self._told_s:
            return True
        if shown is None:
            return False
        now_s, [*_, last] = self._now_s(), self._told_s
        valid = [key for key, told_s in self._told_s.items() if key == last or now_s - told_s < KEEP_S]
        given = shown.encode("utf-8", "replace")
        same = [key for key in valid if hmac.compare_digest(given, key.encode())]  # all are compared
        self._shown_s.update(dict.fromkeys(same, now_s))
        return bool(same)


def split_key(body: Any) -> tuple[Any, str | None]:
    """The body of ``POST /pla/peers`` without the key, and the key. Raises ConfigError, which does not show it."""
    if not isinstance(body, Mapping) or MEMBER not in body:
        return body, None
    key = body[MEMBER]
    if not ROUTER_KEY_FORM.allows(key):
        raise ConfigError(f"{MEMBER} {ROUTER_KEY_FORM.problem}; allowed: {ROUTER_KEY_FORM}")
    return {name: value for name, value in body.items() if name != MEMBER}, key


def find_reserved(obj: Any) -> str | None:
    """What the host's request says that only a router may say; None: nothing."""
    for name in LEG_FIELDS:
        value = getattr(obj, name, None)
        if any(part is not None for part in (value if isinstance(value, list) else [value])):
            return name
    params = getattr(obj, "sampling_params", None)
    for sampling in params if isinstance(params, list) else [params]:
        custom = sampling.get("custom_params") if isinstance(sampling, dict) else None
        for name in custom if isinstance(custom, dict) else ():
            if isinstance(name, str) and is_reserved_param(name):
                return f"custom_params.{name}"
    return None
