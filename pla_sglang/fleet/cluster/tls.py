"""TLS of a cluster: one certificate, which its engines and our router show."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path

from pla_sglang.common.checks import knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.tls import TlsFiles, WorkerTls, make_context


@dataclasses.dataclass(frozen=True)
class ClusterTls(TlsFiles):
    """On where there is a certificate. The flags are those of SGLang's servers."""

    cert: Path | None = knob(
        None,
        "--ssl-certfile FILE",
        "PEM with the certificate, for --host, of all engines and our router: all speak https",
        heading="TLS",
    )
    key: Path | None = knob(None, "--ssl-keyfile FILE", "PEM with the key of --ssl-certfile, without a passphrase")
    ca: Path | None = knob(
        None, "--ssl-ca-certs FILE", "PEM with the authorities of --ssl-certfile; default: those of the system"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ca is not None and self.cert is None:
            raise ConfigError(f"{self.flag_of('ca')} needs {self.flag_of('cert')}")

    def engine_arguments(self) -> list[str]:
        return self._arguments("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")

    def router_arguments(self) -> list[str]:
        """What our router shows clients, and by whom it knows engines."""
        return self._arguments("--tls-cert-path", "--tls-key-path", "--worker-ca")

    def _arguments(self, *flags: str) -> list[str]:
        files = zip(flags, (self.cert, self.key, self.ca), strict=True)
        return [part for flag, path in files if path is not None for part in (flag, str(path.absolute()))]

    def client_context(self) -> ssl.SSLContext | None:
        """To ask members of the cluster; None: by plain HTTP."""
        return None if self.cert is None else make_context(WorkerTls(ca=self.ca))[0]
