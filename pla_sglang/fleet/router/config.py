"""What a relay may do and how long anything may take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pla_sglang.common.checks import KEY, Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.tls import ClientTls, WorkerTls

DAY = Range(0, 86_400, "s", above=True)
COUNT = Range(1, 100)


@dataclasses.dataclass(frozen=True)
class RelayConfig:
    """One relay process. Every relay of a router listens at ``host`` and ``port``."""

    host: str = knob("127.0.0.1", "--host TEXT", "where to listen", heading="front and relays")
    port: int = knob(30_000, "--port", "where to listen; 0: a free port, which is printed", allowed=Range(0, 65_535))
    api_key: str = knob(
        "",
        "--api-key KEY",
        "clients must send it as bearer token",
        allowed=KEY,
        secret=True,
        variable="PLA_ROUTER_API_KEY",
    )
    admin_key: str = knob(
        "",
        "--admin-key KEY",
        "needed for /workers and /pla/*; without it, the key of clients is",
        allowed=KEY,
        secret=True,
        variable="PLA_ROUTER_ADMIN_KEY",
    )
    keys_file: Path | None = knob(
        None,
        "--keys-file FILE",
        "JSON with hashes of clients' keys, in place of --api-key; read when it changes",
    )
    access_log: str = knob("off", "--access-log FILE", "off, - (stderr) or a file: one JSON object a request")
    max_head_bytes: int = knob(
        32_768, "--max-head-bytes", "of one request; more is refused", allowed=Range(1024, 1 << 20, "bytes")
    )
    max_headers: int = knob(100, "--max-headers", "of one request; more are refused", allowed=Range(1, 10_000))
    max_body_bytes: int = knob(
        64 << 20, "--max-body-bytes", "of one request; more is refused", allowed=Range(1, 1 << 32, "bytes")
    )
    max_buffered_bytes: int = knob(
        1 << 30,
        "--max-buffered-bytes",
        "of all bodies that are on their way in or wait for an instance, in one relay; then 503",
        allowed=Range(1, 1 << 40, "bytes"),
    )
    max_kept_bytes: int = knob(
        256 << 20,
        "--max-kept-bytes",
        "of all bodies kept for another attempt, in one relay; beyond it a request gets none",
        allowed=Range(0, 1 << 40, "bytes"),
    )
    max_connections: int = knob(
        20_000,
        "--max-connections",
        "of clients, in one relay; further ones are closed at once",
        allowed=Range(1, 1 << 20),
    )
    head_timeout_s: float = knob(
        10.0, "--head-timeout-s", "for a request head, from its first byte or from the connection's start", allowed=DAY
    )
    body_timeout_s: float = knob(
        30.0, "--body-timeout-s", "for the next 16 KiB of a request body, or what is left of it", allowed=DAY
    )
    idle_timeout_s: float = knob(75.0, "--idle-timeout-s", "between two requests of a connection", allowed=DAY)
    write_timeout_s: float = knob(
        60.0, "--write-timeout-s", "for a client to read on, once its buffers are full", allowed=DAY
    )
    connect_timeout_s: float = knob(3.0, "--connect-timeout-s", "to connect to an instance", allowed=DAY)
    connect_attempts: int = knob(
        3, "--connect-attempts", "dispatches to instances that refuse, until the client is told", allowed=COUNT
    )
    transfer_attempts: int = knob(
        4,
        "--transfer-attempts",
        "dispatches of a request whose KV transfers fail before its client has got anything",
        allowed=COUNT,
    )
    full_attempts: int = knob(
        3,
        "--full-attempts",
        "dispatches of a request to full instances, until its client is told",
        allowed=COUNT,
    )
    dispatch_timeout_s: float = knob(
        60.0, "--dispatch-timeout-s", "for the control plane's answer, waiting for admission included", allowed=DAY
    )
    first_byte_timeout_s: float = knob(
        600.0, "--first-byte-timeout-s", "for an answer's body to begin, once the request is sent", allowed=DAY
    )
    stall_timeout_s: float = knob(300.0, "--stall-timeout-s", "for the next byte of an answer", allowed=DAY)
    request_timeout_s: float = knob(3600.0, "--request-timeout-s", "for the whole request", allowed=DAY)
    drain_pause_s: float = knob(
        0.0,
        "--drain-pause-s",
        "from SIGTERM, when /readyz begins to say no, to the drain; new requests are served meanwhile",
        allowed=Range(0, 86_400, "s"),
    )
    drain_timeout_s: float = knob(30.0, "--drain-timeout-s", "for open requests when the router stops", allowed=DAY)

    tls: ClientTls = dataclasses.field(default_factory=ClientTls)
    worker_tls: WorkerTls = dataclasses.field(default_factory=WorkerTls)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.keys_file is not None and self.api_key:
            raise ConfigError("--keys-file and --api-key cannot be given together; allowed: one of them")
        if self.keys_file is not None and not self.admin_key:
            raise ConfigError("--keys-file needs --admin-key, as no client's key is one for operators")

    @property
    def checks_keys(self) -> bool:
        """What a client sends as its key is for the router, and goes to no instance."""
        return bool(self.api_key) or self.keys_file is not None
