"""Content for operators: /workers, /pla/*, /metrics. Paths and bodies in, status and body out.

GET    /workers                     all workers
POST   /workers                     {"url": "http://HOST:PORT"}: one more
DELETE /workers/NUMBER              finishes what it has, then leaves
POST   /workers/NUMBER/drain        gets nothing new
POST   /workers/NUMBER/undrain
POST   /workers/NUMBER/role         {"role": "prefill", "epoch": 3}: of a stateless instance
GET    /pla/state                   policy, pools, predictor, telemetry, queue
GET    /pla/view                    a page that draws the fleet, live and over the last ten minutes
GET    /pla/view/since/SECONDS      its data; of samples of load those after that time
GET    /pla/ledger                  counts everything anew; 500 when something does not balance
GET    /pla/explain/RID             why a request went where it went, and what its TTFT was made of
POST   /pla/reload                  reads the worker file again
GET    /metrics                     Prometheus
"""

from __future__ import annotations

import dataclasses
import math
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.gauges import row_of
from pla_sglang.fleet.router.control.observability.explain import explain_lengths
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.workers.discovery import parse_url
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.state_file import StateFile
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.control.workers.worker_file import WorkerFile
from pla_sglang.fleet.router.http.bodies import NewWorker, RoleOrder, WorkerRow
from pla_sglang.fleet.router.http.responses import JSON, error_body
from pla_sglang.fleet.router.wire.messages import AdminAsk, AdminResponse
from pla_sglang.fleet.viewer.page import CONTENT_TYPE, live_headers, render_live

METRICS = "text/plain; version=0.0.4; charset=utf-8"
ERROR_TYPES = {404: "not_found", 405: "method", 409: "conflict"}


Act = Callable[..., AdminResponse]  # of the body, then of what stands in the path for its parts in braces


def json_response(value: Any, status: int = 200) -> AdminResponse:
    """Its number is set by ``AdminRoutes.answer_request``."""
    return AdminResponse(0, status, JSON, msgspec.json.encode(value))


def error_response(message: str, status: int) -> AdminResponse:
    """An error in the form that relays give their own."""
    kind = ERROR_TYPES.get(status, "bad_request" if status < 500 else "error")
    return AdminResponse(0, status, JSON, error_body(status, kind, message))


def match_path(template: str, parts: Sequence[str]) -> list[str] | None:
    """What stands in a path for the template's parts in braces; None where it is another path."""
    wanted = template.strip("/").split("/")
    if len(wanted) != len(parts):
        return None
    pairs = list(zip(wanted, parts, strict=True))
    if any(want != got for want, got in pairs if not want.startswith("{")):
        return None
    return [got for want, got in pairs if want.startswith("{")]


def not_allowed(ask: AdminAsk, allowed: Iterable[str]) -> AdminResponse:
    response = error_response(f"there is no {ask.method} {ask.path}", 405)
    return msgspec.structs.replace(response, headers=(("allow", ", ".join(sorted(allowed))),))


def read_seconds(text: str) -> float | None:
    """A finite number; None for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


class AdminRoutes:
    """Answers for one control plane.

    Args:
        worker_file: None: there is none.
        read_state: for /pla/state.
        draw_fleet: for the page of the fleet; of its samples those after the time that it is called with.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        state_file: StateFile,
        worker_file: WorkerFile | None,
        *,
        read_state: Callable[[], dict[str, Any]],
        draw_fleet: Callable[[float], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher, self._workers = dispatcher, dispatcher.table
        self._state_file, self._worker_file = state_file, worker_file
        self._draw_fleet, self._clock = draw_fleet, clock
        # By path and method. A part in braces stands for anything, which the function gets behind the body.
        self.table: dict[str, dict[str, Act]] = {
            "/metrics": {"GET": lambda _: AdminResponse(0, 200, METRICS, dispatcher.series.render_text())},
            "/workers": {"GET": self._list_workers, "POST": self._add_worker},
            "/workers/{worker}": {"GET": self._show_worker, "DELETE": self._remove_worker},
            "/workers/{worker}/drain": {"POST": self._drain_worker},
            "/workers/{worker}/undrain": {"POST": self._undrain_worker},
            "/workers/{worker}/role": {"POST": self._set_role},
            "/pla/state": {"GET": lambda _: json_response(read_state())},
            "/pla/view": {"GET": lambda _: AdminResponse(0, 200, CONTENT_TYPE, render_live(), live_headers())},
            "/pla/view/since/{seconds}": {"GET": self._show_history},
            "/pla/ledger": {"GET": self._show_ledger},
            "/pla/explain/{rid}": {"GET": self._explain_request},
            "/pla/reload": {"POST": self._reload_workers},
        }

    def answer_request(self, ask: AdminAsk) -> AdminResponse:
        try:
            response = self._route_request(ask)
        except WorkerError as error:
            response = error_response(str(error), error.status)
        except ConfigError as error:
            response = error_response(str(error), 400)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            response = error_response(f"the body is not as it should be: {error}", 400)
        return msgspec.structs.replace(response, number=ask.number)

    def _route_request(self, ask: AdminAsk) -> AdminResponse:
        parts = [urllib.parse.unquote(part) for part in ask.path.strip("/").split("/")]
        for template, acts in self.table.items():
            named = match_path(template, parts)
            if named is not None:
                act = acts.get(ask.method)
                return not_allowed(ask, acts) if act is None else act(ask.body, *named)
        return error_response(f"there is no {ask.path}", 404)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _list_workers(self, _: bytes) -> AdminResponse:
        return json_response({"workers": [self._describe(worker) for worker in self._workers]})

    def _show_worker(self, _: bytes, name: str) -> AdminResponse:
        return json_response(self._describe(self._workers.find(name)))

    def _add_worker(self, body: bytes) -> AdminResponse:
        address = parse_url(msgspec.json.decode(body, type=NewWorker).url)
        return self._save_change(self._workers.add(address, self._clock()))

    def _remove_worker(self, _: bytes, name: str) -> AdminResponse:
        worker = self._workers.find(name)
        self._workers.drain(worker, self._clock(), then_remove=True)
        return self._save_change(worker, removed=worker.url)

    def _drain_worker(self, _: bytes, name: str) -> AdminResponse:
        worker = self._workers.find(name)
        self._workers.drain(worker, self._clock())
        return self._save_change(worker)

    def _undrain_worker(self, _: bytes, name: str) -> AdminResponse:
        worker = self._workers.find(name)
        self._workers.undrain(worker, self._clock())
        return self._save_change(worker)

    def _set_role(self, body: bytes, name: str) -> AdminResponse:
        order, worker = msgspec.json.decode(body, type=RoleOrder), self._workers.find(name)
        now_s = self._clock()
        self._dispatcher.policy.order_role(worker.view, order.role, now_s, epoch=order.epoch)
        self._dispatcher.dispatch_pending(now_s)
        return json_response(self._describe(worker))

    def _reload_workers(self, _: bytes) -> AdminResponse:
        if self._worker_file is None:
            raise ConfigError("there is no worker file (--worker-file)")
        changes = self._worker_file.reload(self._clock())
        urls = {"added": [one.url for one in changes.add], "removed": [one.url for one in changes.remove]}
        return json_response(urls)

    def _save_change(self, worker: Worker, *, removed: str | None = None) -> AdminResponse:
        self._state_file.mark_changed(removed=removed)
        self._dispatcher.dispatch_pending(self._clock())
        return json_response(self._describe(worker), 202)

    def _describe(self, worker: Worker) -> WorkerRow:
        return row_of(worker, self._dispatcher, self._clock())

    # -- the fleet over time -----------------------------------------------------------------------------------------

    def _show_history(self, _: bytes, seconds: str) -> AdminResponse:
        since_s = read_seconds(seconds)
        if since_s is None:
            return error_response(f"{seconds!r} is no time; allowed: a number of seconds", 400)
        response = json_response(self._draw_fleet(since_s))
        return msgspec.structs.replace(response, headers=(("cache-control", "no-store"),))

    # -- what became of requests -------------------------------------------------------------------------------------

    def _show_ledger(self, _: bytes) -> AdminResponse:
        audit = self._dispatcher.ledger.audit(self._clock())
        counts = dataclasses.asdict(audit) | {"balanced": audit.balanced}
        return json_response(counts, 200 if audit.balanced else 500)

    def _explain_request(self, _: bytes, rid: str) -> AdminResponse:
        explained = self._dispatcher.explained.explain(rid)
        if explained is None:
            return error_response(f"request {rid!r} is not known (any more)", 404)
        points = self._dispatcher.policy.running.lengths.points_of(rid)
        return json_response({**explained, "lengths": explain_lengths(points, explained["output_tokens"])})
