"""The functions that the seam table names, for the process that parses the command line and serves HTTP."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pla_sglang.common.checks import AGE_HEADER
from pla_sglang.common.errors import ConfigError, HostMismatchError, PlaError
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine import compat, launch_profile, request_checks
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.routes import add_routes, watch_open_requests

logger = logging.getLogger(__name__)

SLO_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"


def after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    pla_config.add_cli_args(parser)


def around_from_cli_args(original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
    """Check our flags, alone and against SGLang's, then publish them to every process that will be started."""
    from pla_patches import host
    from pla_patches.install import install_frontend, version_reasons

    try:
        config = pla_config.from_namespace(args)
        keys = pla_config.read_server_keys(args)
        args.api_key, args.admin_api_key = keys.api_key, keys.admin_api_key
        args.config_of_pla = config  # for the other subscribers of this seam, which raise ConfigError too
        server_args = original(cls, args)
        known = resolve(server_args)
        config = config.for_device(str(known.device))
        compat.check_flags(known, config)
        compat.check_start(known, config)
        compat.check_predictor(server_args, known, config)
        if hands_over_by_nixl(known, config):
            pla_config.publish_address(known.host)
        pools = compat.has_pools(known, config)
        if pools:
            config = config.replace(controller_folder=socket_folder())
        pla_config.publish(config)
        predictor = config.length_predictor is not None
        if config.enabled or config.reports or config.stateless or predictor or not version_reasons():
            install_frontend(
                scheduling=config.enabled,
                pools=pools,
                reports=config.reports,
                stateless=config.stateless,
                predictor=predictor,
            )
            if note := host.untested_note():
                print(f"warning: sglang {host.installed_version()} is {note}", file=sys.stderr, flush=True)
    except PlaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return server_args


def hands_over_by_nixl(args: Any, config: pla_config.PlaConfig) -> bool:
    """On one machine: with several nodes the addresses of their networks are SGLang's matter."""
    in_pair = config.stateless or args.disaggregation_mode != "null"
    return in_pair and args.disaggregation_transfer_backend == "nixl" and args.nnodes == 1


def socket_folder() -> str:
    """A folder that only this user may enter, for the sockets between ranks and controller.

    A server that is killed cannot remove its own, so each start removes those whose process is gone.
    """
    base = Path(tempfile.gettempdir())
    for old in base.glob("pla-sockets-*-*"):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's stays: only its owner may
    return tempfile.mkdtemp(prefix=f"pla-sockets-{os.getpid()}-")


def refuse_bad_request(manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
    request_checks.check_request(manager, obj)


def around_create_tokenized_object(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    return request_checks.make_message(original, manager, obj, *args, **kwargs)


def around_set_server_stop_hook(original: Any, manager: Any, hook: Callable[[], None]) -> None:
    """``hook`` has uvicorn stop; it is called when all answers are out and the schedulers are gone."""
    open_requests = watch_open_requests()

    def stop() -> None:
        hook()
        open_requests.end()

    original(manager, stop)


def before_generate_request(manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
    """Carry targets and age given as headers into the request, and refuse one that is no sane number.

    Raises:
        ConfigError: a ValueError, which SGLang's handlers answer with status 400.
    """
    try:
        from pla_sglang.plugin.engine.snapshot import SLO_KEY, TPOT_KEY

        _carry_target(obj, request, SLO_HEADER, SLO_KEY)
        _carry_target(obj, request, TPOT_HEADER, TPOT_KEY)
        _carry_age(obj, request)
    except ConfigError:
        # SGLang aborts what a refused stream may have started, and for that it has to know whether it was a batch.
        obj.normalize_batch_and_arguments()
        raise


def _carry_target(obj: Any, request: Any, name: str, key: str) -> None:
    from pla_sglang.plugin.engine.snapshot import check_slo_ms

    header = None if request is None else request.headers.get(name)
    target_ms = None if header is None else check_slo_ms(header, f"header {name}")
    params = getattr(obj, "sampling_params", None)
    for sampling in _list_params(obj):
        custom = sampling.get("custom_params")
        if isinstance(custom, dict) and custom.get(key) is not None:
            check_slo_ms(custom[key], f"custom_params.{key}")
        elif target_ms is not None:
            sampling["custom_params"] = {**(custom if isinstance(custom, dict) else {}), key: target_ms}
    if target_ms is not None and params is None:
        obj.sampling_params = {"custom_params": {key: target_ms}}


def _carry_age(obj: Any, request: Any) -> None:
    """The router's word counts, whatever the body says."""
    from pla_sglang.plugin.engine.snapshot import AGE_KEY, check_age_ms

    header = None if request is None else request.headers.get(AGE_HEADER)
    if header is None:
        return
    age_ms = check_age_ms(header, f"header {AGE_HEADER}")
    if getattr(obj, "sampling_params", None) is None:
        obj.sampling_params = {}
    for sampling in _list_params(obj):
        custom = sampling.get("custom_params")
        if custom is None or isinstance(custom, dict):  # anything else is refused as it is
            sampling["custom_params"] = {**(custom or {}), AGE_KEY: age_ms}


def _list_params(obj: Any) -> list[dict[str, Any]]:
    """The sampling parameters of each prompt, where there are any."""
    params = getattr(obj, "sampling_params", None)
    return [one for one in (params if isinstance(params, list) else [params]) if isinstance(one, dict)]


def before_run_http_server(server_args: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Last stop before requests are served: every scheduler must have said that our seams are in place."""
    scheduler_infos = kwargs.get("scheduler_infos") or (args[3] if len(args) > 3 else [])
    # A data-parallel controller passes on a digest of its schedulers: there each scheduler's own check must do. Where
    # the controller is ours, it speaks for itself.
    speaks = resolve(server_args).dp_size == 1 or pla_config.current().controller_folder is not None
    silent = [index for index, info in enumerate(scheduler_infos) if "pla" not in info]
    if silent and speaks:
        raise HostMismatchError([f"scheduler {index} runs without pla_sglang's seams" for index in silent])
    add_routes()
    if pla_config.current().profile_at_launch != "on" or scheduler_infos[0]["pla"]["step_times_cached"]:
        return None
    manager = kwargs["tokenizer_manager"] if "tokenizer_manager" in kwargs else args[0]
    if (why_not := launch_profile.why_not(resolve(server_args))) is not None:
        logger.warning("pla_sglang: passes are not measured at this start: %s", why_not)
        return None
    room_tokens = int(scheduler_infos[0]["max_total_num_tokens"])
    measure = functools.partial(launch_profile.measure_passes, manager, room_tokens)
    return (server_args, *args), kwargs | {"execute_warmup_func": measure_after(kwargs["execute_warmup_func"], measure)}


def measure_after(warm_up: Callable[..., Any], measure: Callable[[], None]) -> Callable[..., Any]:
    """SGLang's warm-up, which says whether the server works, and then ``measure``."""

    def warm_up_and_measure(*args: Any, **kwargs: Any) -> Any:
        works = warm_up(*args, **kwargs)
        if works:
            measure()
        return works

    return warm_up_and_measure
