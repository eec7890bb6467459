"""The report of one instance, as msgpack.

A report is complete: a receiver needs no earlier one, and a lost one only delays the update. ``sequence`` shows gaps,
and sums since the start (``received``, ``errors``) let a receiver take differences across them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from pla_sglang.common.errors import TelemetryError
from pla_sglang.load.legs import LegLoad

VERSION = 1
LARGEST_BYTES = 1 << 20  # a report has about half a kilobyte; larger messages are rejected
MOST_STEPS = 64
MOST_ROWS = 1024

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ClassQueue(msgspec.Struct, frozen=True, array_like=True):
    """Waiting requests of one class and their new tokens, without the running prefill."""

    reqs: Count = 0
    tokens: Count = 0


class Backlog(msgspec.Struct, frozen=True, array_like=True):
    """Prefills not computed yet, queued or running: requests, sum of L, of L*(L+2H), and of H."""

    prefills: Count = 0
    tokens: Count = 0
    attention: Count = 0
    history_tokens: Count = 0


class PassTiming(msgspec.Struct, frozen=True, array_like=True):
    """One prefill pass that has ended: sums of L, of L*(L+2H) and of H over its requests, and its duration.

    ``riders``: decodes that rode along. They are in the duration only.
    """

    new_tokens: Count
    attention: Count
    history_tokens: Count
    requests: Count
    duration_s: Seconds
    riders: Count = 0


class PassTotals(msgspec.Struct, frozen=True, array_like=True):
    """The same summed over several passes, with their number."""

    new_tokens: Count = 0
    attention: Count = 0
    history_tokens: Count = 0
    requests: Count = 0
    passes: Count = 0
    duration_s: Seconds = 0.0

    @classmethod
    def of(cls, timings: Iterable[PassTiming]) -> PassTotals:
        timings = list(timings)
        return cls(
            sum(timing.new_tokens for timing in timings),
            sum(timing.attention for timing in timings),
            sum(timing.history_tokens for timing in timings),
            sum(timing.requests for timing in timings),
            len(timings),
            sum(timing.duration_s for timing in timings),
        )


class FittedPasses(msgspec.Struct, frozen=True, array_like=True):
    """Measured passes behind the coefficients of a report, since the start; 0: they are start values.

    ``prefills`` are behind ``step_model``, ``decodes`` behind the decode steps of ``decode_model``, ``mixed`` behind
    what piggybacked decodes cost there.
    """

    prefills: Count = 0
    decodes: Count = 0
    mixed: Count = 0


class RequestRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that decodes at the instance, or is held there: its KV tokens are the sum of both counts.

    ``rid``: its id at the instance, which a router may have made of the client's. ``rest_tokens``: predicted there to
    come still, at least 1; None: the instance has no prediction. Reports of an earlier version end before it.
    """

    rid: str
    prompt_tokens: Count
    output_tokens: Count
    held: bool = False
    rest_tokens: Count | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of one instance (one data-parallel rank of a server).

    Attributes:
        version: of this format.
        instance: name given by the operator, or host and port of the server.
        dp_rank, dp_size: index and number of data-parallel ranks.
        started_s: wall clock (Unix) of the start. Another value under the same name is another process.
        sequence: 1, 2, ... since the start.
        clock_s: nobody reads it. It is sent, as 0, for receivers of before 0.1.0, which refuse a report without it.
        role: class of the instance in a spatial pool: mixed, short or long.
        draining: work of its former class is not finished yet.
        boundary_tokens: new tokens at which a request without history is long; 0 without a boundary.
        step_model: coefficients of the fitted ``StepModel`` in its order, in device seconds; empty: none.
        decode_model: coefficients of the fitted ``MixedBatchModel`` in its order, in device seconds; empty: none.
        fitted: how many passes the coefficients of both were fitted to.
        received: requests taken from the front since the start, refused ones included.
        backlog, short, long: see their types; a request in its PD handshake counts.
        prefill_age_s: wait of the oldest unfinished prefill; 0 without one.
        running, context_tokens: requests that decode, and their KV tokens.
        waiting_decodes, waiting_decode_tokens: decodes that wait for KV or memory, and their KV tokens; whether
            a prefill elsewhere is done is not known here.
        kv_used_tokens, kv_capacity_tokens: used tokens cannot be evicted.
        passes: prefill passes since the last report.
        steps: each of them, the latest ``MOST_STEPS``.
        decode_step_s: mean duration of recent decode steps; None without any.
        token_interval_s: mean time between two tokens of a request over a recent window; None without tokens.
        ttft_ratio: mean of TTFT / target over a recent window, in the engine; None without targets or first tokens.
        utilisation: busy share of a recent window.
        errors: failed requests since the start, by kind.
        legs: of a stateless instance.
        requests: rows of running requests, in the reports of their own cadence; None: in others.
    """

    instance: str
    dp_rank: Count = 0
    dp_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    started_s: float = 0.0
    sequence: Annotated[int, msgspec.Meta(ge=1)]
    clock_s: float = msgspec.field(default_factory=float)  # made by a call, a default is sent as well
    version: int = VERSION
    role: str = "mixed"
    draining: bool = False
    boundary_tokens: Count = 0
    step_model: tuple[float, ...] = ()
    decode_model: tuple[float, ...] = ()
    fitted: FittedPasses = FittedPasses()
    received: Count = 0
    backlog: Backlog = Backlog()
    short: ClassQueue = ClassQueue()
    long: ClassQueue = ClassQueue()
    prefill_age_s: Seconds = 0.0
    running: Count = 0
    context_tokens: Count = 0
    waiting_decodes: Count = 0
    waiting_decode_tokens: Count = 0
    kv_used_tokens: Count = 0
    kv_capacity_tokens: Count = 0
    passes: PassTotals = PassTotals()
    steps: Annotated[tuple[PassTiming, ...], msgspec.Meta(max_length=MOST_STEPS)] = ()
    decode_step_s: Seconds | None = None
    token_interval_s: Seconds | None = None
    ttft_ratio: Seconds | None = None
    utilisation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    errors: dict[str, Count] = {}
    legs: LegLoad | None = None
    requests: Annotated[tuple[RequestRow, ...], msgspec.Meta(max_length=MOST_ROWS)] | None = None

    @property
    def key(self) -> str:
        """Unique name of the instance: ``name`` or, with several ranks, ``name#rank``."""
        return self.instance if self.dp_size == 1 else f"{self.instance}#{self.dp_rank}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    return _encoder.encode(report)


def decode(data: bytes) -> Report:
    """A checked report. Fields that a later version adds are ignored.

    Raises:
        TelemetryError: too large, not msgpack, a field out of range, or another version.
    """
    if len(data) > LARGEST_BYTES:
        raise TelemetryError(f"a report of {len(data)} bytes; allowed: {LARGEST_BYTES}")
    try:
        report = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TelemetryError(f"no report: {error}") from None
    if report.version != VERSION:
        raise TelemetryError(f"report of version {report.version}; this side knows {VERSION}")
    return report
