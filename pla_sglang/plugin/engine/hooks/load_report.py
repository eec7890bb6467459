"""The functions that the seam table names, for scheduler processes that report their load. Each only observes."""

from __future__ import annotations

import logging
import socket
from typing import Any

from pla_sglang.load.sockets import Pusher
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.host.ranks import dp_rank
from pla_sglang.plugin.engine.probe import Identity, Probe

logger = logging.getLogger(__name__)

EVERYWHERE = frozenset({"", "0.0.0.0", "::", "*"})

_probe: Probe | None = None  # None before the scheduler is ready, and on ranks that do not report
_received = 0  # before the probe was there


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """The scheduler is ready: verify our seams, then start to report. Raises HostMismatchError."""
    global _probe
    from sglang.srt.runtime_context import get_parallel

    from pla_patches.install import verify_this_process

    verify_this_process()
    ranks = get_parallel()
    if ranks.pp_rank == 0 and ranks.attn_tp_rank == 0 and ranks.attn_cp_rank == 0:
        _probe = build(scheduler, pla_config.current())
        _probe.on_received(_received)
        scheduler.pla_probe = _probe
        logger.info("pla_sglang: reports load to %s", ", ".join(pusher.address for pusher in _probe.pushers))
    return info


def name_of(host: str, port: int) -> str:
    """The name of a server in its reports. Servers that listen on every address of their machine have the same host."""
    return f"{socket.gethostname() if host in EVERYWHERE else host}:{port}"


def build(scheduler: Any, config: pla_config.PlaConfig) -> Probe:
    """The probe that ``config`` asks for, connected."""
    args = resolve(scheduler.server_args)
    identity = Identity(
        instance=config.instance or name_of(args.host, args.port),
        dp_rank=dp_rank(scheduler),
        dp_size=args.dp_size,
        disaggregation=args.disaggregation_mode,
    )
    wanted = (config.telemetry, pla_config.controller_address(config, "reports"))
    addresses = [address for address in wanted if address is not None]
    return Probe(scheduler, config, identity, [Pusher(address) for address in addresses])


def after_pull_raw_reqs(requests: Any, receiver: Any) -> None:
    """Count generation requests as they come from the front, refused ones included."""
    global _received
    if not requests:
        return
    from sglang.srt.managers.io_struct import (
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )

    count = 0
    for message in requests:
        if isinstance(message, (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)):
            count += 1
        elif isinstance(message, (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)):
            count += len(message)
    if _probe is None:
        _received += count
    else:
        _probe.on_received(count)


def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if _probe is not None:
        _probe.on_launch(batch)


def after_run_batch(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if _probe is not None:
        _probe.on_launched(result)


def after_process_batch_result(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if _probe is not None:
        _probe.on_result(batch)


def after_on_idle(result: Any, scheduler: Any) -> None:
    if _probe is not None:
        _probe.on_idle()


def after_prepare_abort(result: Any, req: Any, error_message: str, status_code: Any = None) -> None:
    """A request ends badly: given up by its client, or by the host with a status."""
    if _probe is not None:
        _probe.on_error("aborted" if status_code is None else f"http_{int(status_code)}")


def after_get_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if _probe is not None:
        block = output.internal_state.setdefault("pla", {})
        block["telemetry"] = _probe.state()
        block.setdefault("config", _probe.config.to_dict())  # a router looks there for our name in reports
    return output
