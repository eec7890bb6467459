"""The file of clients' keys: hashes, tenants and their limits, read again when it changes.

    {"tenants": {"team-a": {"prefill_seconds_per_second": 0.5, "burst_seconds": 10}, "team-b": {}},
     "keys": [{"id": "a-1", "sha256": "<64 hex digits>", "tenant": "team-a", "expires": "2027-01-01T00:00:00Z"}]}

No key stands in it, and no message here shows a hash. Keys are long and random, so one round of SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import read_stamp, read_text
from pla_sglang.policy.tenant_limits import TenantLimit

MOST_CHARS = 16 << 20
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[\x21-\x7e]{1,64}")  # as of the header x-tenant-id
logger = logging.getLogger(__name__)


class ListedTenant(msgspec.Struct, forbid_unknown_fields=True):
    """One tenant; without both numbers it has no limit."""

    prefill_seconds_per_second: float | None = None
    burst_seconds: float | None = None


class ListedKey(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One key. ``id`` is for people; ``expires``: from when on it is refused, None: never."""

    id: str
    sha256: str
    tenant: str
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class ListedKeys(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    tenants: dict[str, ListedTenant]
    keys: list[ListedKey]


class ClientKeys(msgspec.Struct, frozen=True):
    """A version of the file. ``by_digest``: keys by their SHA-256."""

    by_digest: Mapping[str, ListedKey]
    limits: Mapping[str, TenantLimit]

    def find_key(self, token: bytes) -> ListedKey | None:
        """The entry of a key that a client has sent.

        What is looked up is a hash of it, so that how long this takes says nothing about the keys there are.
        """
        digest = hashlib.sha256(token).hexdigest()
        key = self.by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.sha256, digest) else None


def has_expired(key: ListedKey, now_s: float) -> bool:
    """``now_s``: unix seconds."""
    return key.expires is not None and key.expires.timestamp() <= now_s


class KeysFile:
    """The file at ``path``. A new version that is broken leaves the former one in use. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, read_stamp(path)
        self.keys = read_keys(path)

    def follow_file(self) -> bool:
        """To be called about once a second. True if there is a new version."""
        stamp = read_stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.keys = read_keys(self._path)
        except ConfigError as error:
            logger.error("the keys are left as they were: %s", error)
            return False
        logger.info("keys file: %d keys", len(self.keys.by_digest))
        return True


def read_keys(path: Path) -> ClientKeys:
    """Raises ConfigError with the entry and the field that are wrong."""
    where = f"--keys-file {path}"
    text = read_text(path, ConfigError, most=MOST_CHARS)
    try:
        listed = msgspec.json.decode(text, type=ListedKeys)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None
    limits = {}
    for name, tenant in listed.tenants.items():
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{where}: tenants: {name!r} is not valid; allowed: 1 to 64 visible characters of ASCII")
        limit = _read_limit(f"{where}: tenants {name!r}", tenant)
        if limit is not None:
            limits[name] = limit
    by_digest: dict[str, ListedKey] = {}
    ids = set()
    for number, key in enumerate(listed.keys):
        entry = f"{where}: keys[{number}] {key.id!r}"
        if not key.id or key.id in ids:
            raise ConfigError(f"{entry}: id is empty or stands there twice")
        if _HASH.fullmatch(key.sha256) is None:  # not shown: it may be the key itself
            raise ConfigError(f"{entry}: sha256 is not valid; allowed: 64 hexadecimal digits in small letters")
        if key.tenant not in listed.tenants:
            raise ConfigError(f"{entry}: tenant {key.tenant!r} is not known; allowed: those under tenants")
        if key.sha256 in by_digest:
            raise ConfigError(f"{entry}: sha256 is that of {by_digest[key.sha256].id!r}")
        by_digest[key.sha256] = key
        ids.add(key.id)
    return ClientKeys(by_digest, limits)


def _read_limit(where: str, tenant: ListedTenant) -> TenantLimit | None:
    rate, burst = tenant.prefill_seconds_per_second, tenant.burst_seconds
    if rate is None and burst is None:
        return None
    if rate is None or burst is None:
        raise ConfigError(f"{where}: prefill_seconds_per_second and burst_seconds go together")
    try:
        return TenantLimit(rate, burst)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
