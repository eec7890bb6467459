"""Content for operators: /workers, /pla/*, /metrics. Paths and bodies in, status and body out.

GET    /workers                     all workers
POST   /workers                     {"url": "http://HOST:PORT"}: one more
DELETE /workers/NUMBER              finishes what it has, then leaves
POST   /workers/NUMBER/drain        gets nothing new
POST   /workers/NUMBER/undrain
GET    /pla/state                   policy, pools, predictor, telemetry, queue
GET    /pla/ledger                  counts everything anew; 500 when something does not balance
GET    /pla/explain/RID             why a request went where it went, and what its TTFT was made of
POST   /pla/reload                  reads the worker file again
GET    /metrics                     Prometheus
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import orjson

from pla_sglang.errors import ConfigError
from pla_sglang.router.control.desk import Desk
from pla_sglang.router.control.discovery import parse_url
from pla_sglang.router.control.errors import WorkerError
from pla_sglang.router.messages import AdminAnswer, AdminAsk

JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /workers."""

    url: str


class Admin(Protocol):
    """What the routes below need of the control plane."""

    desk: Desk

    def state(self) -> dict[str, Any]: ...

    def reload(self) -> dict[str, Any]:
        """Raises ConfigError for a worker file that cannot be read; nothing changes then."""

    def wish(self, *, removed: str | None = None) -> None:
        """An operator has wished something that is to be remembered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Status and body."""

    status: int
    body: bytes
    content_type: str = JSON


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def error_answer(message: str, status: int) -> Answer:
    return json_answer({"error": {"message": message, "type": "BadRequest" if status < 500 else "Error"}}, status)


class Routes:
    """Answers for one control plane."""

    def __init__(self, plane: Admin, clock: Callable[[], float]) -> None:
        self._plane = plane
        self._clock = clock

    def answer(self, ask: AdminAsk) -> AdminAnswer:
        try:
            made = self._route(ask)
        except WorkerError as error:
            made = error_answer(str(error), error.status)
        except ConfigError as error:
            made = error_answer(str(error), 400)
        except msgspec.MsgspecError as error:
            made = error_answer(f"the body is not as it should be: {error}", 400)
        return AdminAnswer(ask.number, made.status, made.content_type, made.body)

    def _route(self, ask: AdminAsk) -> Answer:
        parts = [urllib.parse.unquote(part) for part in ask.path.strip("/").split("/")]
        match ask.method, parts:
            case "GET", ["metrics"]:
                return Answer(200, self._plane.desk.series.text(), METRICS)
            case "GET", ["pla", "state"]:
                return json_answer(self._plane.state())
            case "GET", ["pla", "ledger"]:
                return self._ledger()
            case "GET", ["pla", "explain", rid]:
                return self._explain(rid)
            case "POST", ["pla", "reload"]:
                return json_answer(self._plane.reload())
            case _, ["workers", *rest]:
                return self._workers(ask.method, rest, ask.body)
        return error_answer(f"there is no {ask.method} {ask.path}", 404)

    def _workers(self, method: str, rest: list[str], body: bytes) -> Answer:
        table, now_s = self._plane.desk.table, self._clock()
        match method, rest:
            case "GET", []:
                return json_answer({"workers": [worker.to_dict(now_s) for worker in table]})
            case "GET", [name]:
                return json_answer(table.find(name).to_dict(now_s))
            case "POST", []:
                worker = table.add(parse_url(msgspec.json.decode(body, type=NewWorker).url), now_s)
            case "DELETE", [name]:
                worker = table.find(name)
                table.drain(worker, now_s, then_remove=True)
                self._plane.wish(removed=worker.url)
            case "POST", [name, "drain"]:
                worker = table.find(name)
                table.drain(worker, now_s)
            case "POST", [name, "undrain"]:
                worker = table.find(name)
                table.undrain(worker, now_s)
            case _:
                return error_answer(f"there is no {method} /workers/{'/'.join(rest)}", 404)
        self._plane.wish()
        self._plane.desk.pump(now_s)
        return json_answer(worker.to_dict(now_s), 202)

    def _ledger(self) -> Answer:
        audit = self._plane.desk.ledger.audit(self._clock())
        told = dataclasses.asdict(audit) | {"balanced": audit.balanced}
        return json_answer(told, 200 if audit.balanced else 500)

    def _explain(self, rid: str) -> Answer:
        told = self._plane.desk.stories.explain(rid)
        if told is None:
            return error_answer(f"request {rid!r} is not known (any more)", 404)
        return json_answer(told)
