"""TLS of the router: contexts of files with certificates and keys, made anew when these change. No sockets here.

A new context is for new connections; those that are open keep what they agreed on.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from pla_sglang.common.checks import declared_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.key_sources import warn_of_readers
from pla_sglang.common.reading import Stamp, read_stamp

SOON_S = 14 * 86_400.0  # authorities that renew by themselves do so earlier; people need days
MOST_BYTES = 1 << 20
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _SEQUENCE, _VERSION = 0x17, 0x30, 0xA0  # tags of DER
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """PEM files of one side of connections. Raises ConfigError where one is given without the one that it needs."""

    cert: Path | None
    key: Path | None
    ca: Path | None

    def __post_init__(self) -> None:
        for given, needed in (("cert", "key"), ("key", "cert")):
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ConfigError(f"{self.flag_of(given)} needs {self.flag_of(needed)}")

    def flag_of(self, name: str) -> str:
        return next(one.knob.name for one in declared_fields(type(self)) if one.field.name == name)

    @property
    def scheme(self) -> str:
        """With which the address of who shows the certificate begins."""
        return "http" if self.cert is None else "https"

    def has_any(self) -> bool:
        return any(path is not None for path in (self.cert, self.key, self.ca))

    def read_stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(None if path is None else read_stamp(path) for path in (self.cert, self.key, self.ca))


@dataclasses.dataclass(frozen=True)
class ClientTls(TlsFiles):
    """TLS for clients; on where there is a certificate."""

    cert: Path | None = knob(
        None,
        "--tls-cert-path FILE",
        "PEM with the router's certificate and its chain: clients come by https",
        heading="TLS",
    )
    key: Path | None = knob(None, "--tls-key-path FILE", "PEM with the key of --tls-cert-path, without a passphrase")
    ca: Path | None = knob(
        None, "--tls-client-ca FILE", "PEM with authorities: a client must show a certificate of one of them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ca is not None and self.cert is None:
            raise ConfigError(f"{self.flag_of('ca')} needs {self.flag_of('cert')}")


@dataclasses.dataclass(frozen=True)
class WorkerTls(TlsFiles):
    """TLS to instances, of those with https in their address."""

    cert: Path | None = knob(
        None, "--worker-cert-path FILE", "PEM with the certificate that instances are shown, where they ask for one"
    )
    key: Path | None = knob(None, "--worker-key-path FILE", "PEM with the key of --worker-cert-path")
    ca: Path | None = knob(
        None, "--worker-ca FILE", "PEM with the authorities of instances with https; default: those of the system"
    )


class TlsContext:
    """The context of ``files`` for new connections. A new version of the files that is broken leaves it as it was.

    Raises ConfigError where the files cannot be used; that the certificate has expired only the log tells.

    Attributes:
        expires_at_s: when the own certificate does, in unix seconds; None without one.
    """

    def __init__(self, files: TlsFiles, *, now_s: float) -> None:
        self.files = files
        self.expires_at_s: float | None = None
        self._context: ssl.SSLContext | None = None  # without files it is made when it is needed: it is large
        self._stamps = files.read_stamps()
        self._told = 0
        if files.has_any():
            self._context, self.expires_at_s = make_context(files)
            self._tell_expiry(now_s)

    @property
    def context(self) -> ssl.SSLContext:
        if self._context is None:
            self._context, _ = make_context(self.files)
        return self._context

    def left_s(self, now_s: float) -> float | None:
        """Until the own certificate expires, below 0 behind that; None without one."""
        return None if self.expires_at_s is None else self.expires_at_s - now_s

    def follow_files(self, now_s: float) -> None:
        """To be called about once a second, with unix seconds: reads files that have changed."""
        stamps = self.files.read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                context, expires_at_s = make_context(self.files)
                refuse_expired(self.files, expires_at_s, now_s)
            except ConfigError as error:
                logger.error("TLS is left as it was: %s", error)
            else:
                self._context, self.expires_at_s, self._told = context, expires_at_s, 0
                logger.info(
                    "TLS: new connections use the files that have changed: %s", self.files.cert or self.files.ca
                )
        self._tell_expiry(now_s)

    def _tell_expiry(self, now_s: float) -> None:
        """Once that it is soon, and once that it is over."""
        left_s = self.left_s(now_s)
        if left_s is None or self.expires_at_s is None:
            return
        stage = 2 if left_s <= 0 else 1 if left_s < SOON_S else 0
        if stage > self._told:
            days = "has expired" if stage == 2 else f"expires in {left_s / 86_400:.0f} day(s)"
            level = logging.ERROR if stage == 2 else logging.WARNING
            logger.log(level, "certificate %s %s: %s", self.files.cert, days, format_time(self.expires_at_s))
        self._told = stage


def check_files(files: TlsFiles, *, now_s: float) -> None:
    """At the start. Raises ConfigError where they cannot be used, or the certificate has expired."""
    if files.key is not None:
        warn_of_readers(files.flag_of("key"), files.key)
    if files.has_any():
        refuse_expired(files, make_context(files)[1], now_s)


def refuse_expired(files: TlsFiles, expires_at_s: float | None, now_s: float) -> None:
    """Raises ConfigError."""
    if expires_at_s is not None and expires_at_s <= now_s:
        raise ConfigError(f"{files.flag_of('cert')} {files.cert} has expired: {format_time(expires_at_s)}")


def make_context(files: TlsFiles) -> tuple[ssl.SSLContext, float | None]:
    """With the time when the own certificate expires. Raises ConfigError with the flag and the file that are wrong."""
    pems = {name: _read_file(files, name) for name in ("cert", "key", "ca")}
    if isinstance(files, ClientTls):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        if files.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _load_ca(context, files)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if files.ca is None:
            context.load_default_certs()
        else:
            _load_ca(context, files)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    cert = pems["cert"]
    if cert is None:
        return context, None
    try:
        expires_at_s = read_expiry(cert)
    except ValueError:
        raise ConfigError(f"{files.flag_of('cert')} {files.cert} has no certificate; allowed: PEM") from None
    _load_own(context, files)
    return context, expires_at_s


def _read_file(files: TlsFiles, name: str) -> bytes | None:
    """So that an error names the file: ``ssl`` does not."""
    path: Path | None = getattr(files, name)
    if path is None:
        return None
    where = f"{files.flag_of(name)} {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{where} is too large; allowed: {MOST_BYTES} bytes of PEM")
    return data


def _load_ca(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.ca is not None
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(f"{files.flag_of('ca')} {files.ca} has no certificate; allowed: PEM") from None


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert is not None
    where = f"{files.flag_of('key')} {files.key}"

    def refuse_passphrase() -> NoReturn:
        raise ConfigError(f"{where} has a passphrase; allowed: a key without one")

    try:
        context.load_cert_chain(files.cert, files.key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where} is not the key of {files.flag_of('cert')} {files.cert}") from None
        reason = f" ({error.reason})" if error.reason else ""
        raise ConfigError(f"{where} cannot be used with {files.cert}{reason}; allowed: a private key, PEM") from None
    except OSError as error:  # it has gone since it was read
        raise ConfigError(f"{where}: {error.strerror}") from None


def read_expiry(pem: bytes) -> float:
    """When the first certificate of a PEM expires, in unix seconds. Raises ValueError for what is none.

    The standard library tells this of a peer's certificate only. RFC 5280: the validity is the fifth part of what is
    signed, behind the version, which may be left out.
    """
    found = _CERTIFICATE.search(pem)
    if found is None:
        raise ValueError("no certificate")
    try:
        der = base64.b64decode(found[1])
        _, at, _ = _read_der(der, 0)  # the certificate
        _, at, _ = _read_der(der, at)  # what is signed
        tag, _, end = _read_der(der, at)
        skipped = 3 if tag == _VERSION else 2  # serial number, algorithm, issuer, but for the part just read
        for _ in range(skipped):
            tag, _, end = _read_der(der, end)
        tag, at, _ = _read_der(der, end)
        if tag != _SEQUENCE:
            raise ValueError("no validity")
        _, _, at = _read_der(der, at)  # from when on
        tag, at, end = _read_der(der, at)
    except (IndexError, binascii.Error):
        raise ValueError("damaged") from None
    text = der[at:end].decode("ascii")
    year = "" if tag != _UTC_TIME else "19" if text >= "50" else "20"
    return datetime.strptime(year + text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _read_der(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the element at ``at``, and where its content begins and ends. Raises IndexError behind the end."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        begin, length = begin + (length & 0x7F), int.from_bytes(der[begin : begin + (length & 0x7F)], "big")
    return tag, begin, begin + length


def format_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
