"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write_key(key: ec.EllipticCurvePrivateKey, path: Path, passphrase: bytes | None = None) -> None:
    how: serialization.KeySerializationEncryption = (
        serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    )
    form = serialization.PrivateFormat.PKCS8
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, how))


@dataclass
class Authority:
    """Signs what tests ask for; its files lie in ``folder``. ``ca``: its own certificate."""

    folder: Path
    name: str = "authority"
    _key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.ca = self.folder / f"{self.name}.pem"
        self.ca.write_bytes(self._sign(self.name, self._key, days=3650, is_ca=True).public_bytes(_PEM))

    def issue(
        self, name: str, *, days: float = 90, host: str = "127.0.0.1", passphrase: bytes | None = None
    ) -> tuple[Path, Path]:
        """Paths of a certificate for ``host`` that ends in ``days``, below 0 before now, and of its key.

        Issued again under the same name, it replaces both.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        cert_path, key_path = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        _write_key(key, key_path, passphrase)
        cert_path.write_bytes(self._sign(name, key, days=days, host=host).public_bytes(_PEM))
        return cert_path, key_path

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, *, days: float, host: str = "", is_ca: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 365 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        if host:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            made = made.add_extension(names, critical=False)
        return made.sign(self._key, hashes.SHA256())


_PEM = serialization.Encoding.PEM


def client_context(ca: Path, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """A client that trusts ``ca`` alone, and shows ``own``."""
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(*own)
    return context


def server_context(own: tuple[Path, Path], client_ca: Path | None = None) -> ssl.SSLContext:
    """A server that shows ``own``, and where ``client_ca`` is given asks for a certificate of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return context
