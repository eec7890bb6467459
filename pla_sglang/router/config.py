"""What a relay may do and how long anything may take. Made by the launcher, handed to every relay process as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pla_sglang.errors import ConfigError
from pla_sglang.policy.checks import require

DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True)
class RelayConfig:
    """One relay process.

    Attributes:
        host, port: where clients connect; every relay of a router listens there.
        api_key: what clients must send as bearer token; empty: they need none.
        admin_key: as ``api_key``, for /workers and /pla/*; empty: ``api_key`` is needed there too.
        access_log: "off", "-" for stderr, or a file: one JSON object a request.
        max_head_bytes, max_headers, max_body_bytes: of one request; more is refused.
        max_buffered_bytes: of all bodies that are on their way in, in one relay; then 503.
        max_kept_bytes: of all bodies that are kept for another attempt, in one relay; beyond it a request gets none.
        max_connections: of clients, in one relay; further ones are closed at once.
        head_timeout_s: for a complete request head, from its first byte or from the connection's start.
        body_timeout_s: for the next 16 KiB of a request body, or what is left of it.
        idle_timeout_s: between two requests of a connection.
        write_timeout_s: for a client to read on, once its buffers are full.
        connect_timeout_s: to an instance. connect_attempts: dispatches until the client is told.
        transfer_attempts: dispatches of a request whose KV transfers fail before its client has got anything.
        dispatch_timeout_s: for the control plane's answer; it includes waiting for admission.
        first_byte_timeout_s: for an answer's body to begin, once the request is sent.
        stall_timeout_s: for the next byte of an answer.
        request_timeout_s: for the whole request.
        drain_timeout_s: for open requests when the router stops.
        upstream_idle_s: how long an unused connection to an instance is kept; less than the 5 s after which SGLang
            closes it, or a request could meet a connection that is being closed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = ""
    admin_key: str = ""
    access_log: str = "off"
    max_head_bytes: int = 32_768
    max_headers: int = 100
    max_body_bytes: int = 64 << 20
    max_buffered_bytes: int = 1 << 30
    max_kept_bytes: int = 256 << 20
    max_connections: int = 20_000
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    connect_timeout_s: float = 3.0
    connect_attempts: int = 3
    transfer_attempts: int = 4
    dispatch_timeout_s: float = 60.0
    first_byte_timeout_s: float = 600.0
    stall_timeout_s: float = 300.0
    request_timeout_s: float = 3600.0
    drain_timeout_s: float = 30.0
    upstream_idle_s: float = 3.0

    def __post_init__(self) -> None:
        require("port", self.port, 0, 65_535)
        require("max_head_bytes", self.max_head_bytes, 1024, 1 << 20)
        require("max_headers", self.max_headers, 1, 10_000)
        require("max_body_bytes", self.max_body_bytes, 1, 1 << 32)
        require("max_buffered_bytes", self.max_buffered_bytes, 1, 1 << 40)
        require("max_kept_bytes", self.max_kept_bytes, 0, 1 << 40)
        require("max_connections", self.max_connections, 1, 1 << 20)
        require("connect_attempts", self.connect_attempts, 1, 100)
        require("transfer_attempts", self.transfer_attempts, 1, 100)
        for field in dataclasses.fields(self):
            if field.name.endswith("_s"):
                require(field.name, getattr(self, field.name), 0, DAY_S, above=True)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RelayConfig:
        """Raises ConfigError for unknown names and values out of range."""
        values: dict[str, Any] = json.loads(text)
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"a relay has no setting {', '.join(sorted(unknown))}")
        return cls(**values)
