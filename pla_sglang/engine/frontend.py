"""The functions that the seam table names, for the process that parses the command line and serves HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from pla_sglang import config as pla_config
from pla_sglang.emulate import arguments as emulation
from pla_sglang.engine import compat
from pla_sglang.errors import ConfigError, HostMismatchError, PlaError

SLO_HEADER = "x-slo-ttft-ms"


def after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    pla_config.add_cli_args(parser)


def around_from_cli_args(original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
    """Check our flags, alone and against SGLang's, then publish them to every process that will be started."""
    from pla_patches.install import install_frontend

    try:
        config = pla_config.from_namespace(args)
        server_args = original(cls, args)
        compat.check(server_args, config)
        emulation.check(server_args, config)
        pla_config.publish(config)
        if config.enabled:
            install_frontend()
    except PlaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return server_args


def before_generate_request(manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
    """Carry a TTFT target given as a header into the request, and refuse one that is no sane number.

    Raises:
        ConfigError: a ValueError, which SGLang's handlers answer with status 400.
    """
    try:
        _carry_target(obj, request)
    except ConfigError:
        # SGLang aborts what a refused stream may have started, and for that it has to know whether it was a batch.
        obj.normalize_batch_and_arguments()
        raise


def _carry_target(obj: Any, request: Any) -> None:
    from pla_sglang.engine.snapshot import SLO_KEY, check_slo_ms

    header = None if request is None else request.headers.get(SLO_HEADER)
    target_ms = None if header is None else check_slo_ms(header, f"header {SLO_HEADER}")
    params = getattr(obj, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        if not isinstance(one, dict):
            continue
        custom = one.get("custom_params")
        if isinstance(custom, dict) and custom.get(SLO_KEY) is not None:
            check_slo_ms(custom[SLO_KEY], f"custom_params.{SLO_KEY}")
        elif target_ms is not None:
            one["custom_params"] = {**(custom if isinstance(custom, dict) else {}), SLO_KEY: target_ms}
    if target_ms is not None and params is None:
        obj.sampling_params = {"custom_params": {SLO_KEY: target_ms}}


def before_run_http_server(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Last stop before requests are served: every scheduler must have said that our seams are in place."""
    scheduler_infos = kwargs.get("scheduler_infos") or (args[3] if len(args) > 3 else [])
    # The data-parallel controller passes on a digest of its schedulers; there each scheduler's own check must do.
    silent = [index for index, info in enumerate(scheduler_infos) if "pla" not in info]
    if silent and server_args.dp_size == 1:
        raise HostMismatchError([f"scheduler {index} runs without pla_sglang's seams" for index in silent])
    add_routes()


def add_routes() -> None:
    """``GET /pla/state`` and ``POST /pla/config``, behind the same admin key as SGLang's own control endpoints."""
    from fastapi import Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.responses import JSONResponse

    from pla_sglang.engine import control

    async def states() -> list[dict[str, Any]]:
        manager = http_server._global_state.tokenizer_manager
        return [state.get("pla", {}) for state in await manager.get_internal_state()]

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def pla_state() -> JSONResponse:
        return JSONResponse({"schedulers": await states()})

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def pla_config_route(request: Request) -> JSONResponse:
        try:
            values = await request.json()
        except ValueError:
            return _error("the body is not valid JSON")
        current = pla_config.PlaConfig.from_mapping((await states())[0]["config"])
        try:
            wire = control.encode(values, current)
            compat.check(http_server._global_state.tokenizer_manager.server_args, control.decode(wire, current))
        except ConfigError as error:
            return _error(str(error))
        manager = http_server._global_state.tokenizer_manager
        results = await manager.set_internal_state(SetInternalStateReq(server_args=wire))
        if not all(results):
            return _error("a scheduler refused the change; its log says why")
        return JSONResponse({"schedulers": [{"config": state["config"]} for state in await states()]})

    def _error(message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message, "type": "BadRequest", "code": 400}}, status_code=400)

    # Endpoints are functions of this scope, so their annotations must be real objects for FastAPI.
    pla_config_route.__annotations__["request"] = Request
    for path, route, methods in (("/pla/state", pla_state, ["GET"]), ("/pla/config", pla_config_route, ["POST"])):
        route.__annotations__.pop("return", None)
        http_server.app.add_api_route(path, route, methods=methods)
