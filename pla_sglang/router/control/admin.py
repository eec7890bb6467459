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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import orjson

from pla_sglang.errors import ConfigError
from pla_sglang.router.control.desk import Desk
from pla_sglang.router.control.discovery import parse_url
from pla_sglang.router.control.errors import WorkerError
from pla_sglang.router.control.workers import Worker
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
    headers: tuple[tuple[str, str], ...] = ()


Act = Callable[..., Answer]  # of the body, then of what stands in the path for its parts in braces


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def error_answer(message: str, status: int) -> Answer:
    return json_answer({"error": {"message": message, "type": "BadRequest" if status < 500 else "Error"}}, status)


def match(template: str, parts: Sequence[str]) -> list[str] | None:
    """What stands in a path for the template's parts in braces; None where it is another path."""
    wanted = template.strip("/").split("/")
    if len(wanted) != len(parts):
        return None
    pairs = list(zip(wanted, parts, strict=True))
    if any(want != got for want, got in pairs if not want.startswith("{")):
        return None
    return [got for want, got in pairs if want.startswith("{")]


def not_allowed(ask: AdminAsk, allowed: Iterable[str]) -> Answer:
    body = error_answer(f"there is no {ask.method} {ask.path}", 405).body
    return Answer(405, body, headers=(("allow", ", ".join(sorted(allowed))),))


class Routes:
    """Answers for one control plane."""

    def __init__(self, plane: Admin, clock: Callable[[], float]) -> None:
        self._plane = plane
        self._clock = clock
        # By path and method. A part in braces stands for anything, which the function gets behind the body.
        self.table: dict[str, dict[str, Act]] = {
            "/metrics": {"GET": lambda _: Answer(200, self._plane.desk.series.text(), METRICS)},
            "/workers": {"GET": self._workers, "POST": self._add},
            "/workers/{worker}": {"GET": self._worker, "DELETE": self._remove},
            "/workers/{worker}/drain": {"POST": self._drain},
            "/workers/{worker}/undrain": {"POST": self._undrain},
            "/pla/state": {"GET": lambda _: json_answer(self._plane.state())},
            "/pla/ledger": {"GET": self._ledger},
            "/pla/explain/{rid}": {"GET": self._explain},
            "/pla/reload": {"POST": lambda _: json_answer(self._plane.reload())},
        }

    def answer(self, ask: AdminAsk) -> AdminAnswer:
        try:
            made = self._route(ask)
        except WorkerError as error:
            made = error_answer(str(error), error.status)
        except ConfigError as error:
            made = error_answer(str(error), 400)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            made = error_answer(f"the body is not as it should be: {error}", 400)
        return AdminAnswer(ask.number, made.status, made.content_type, made.body, made.headers)

    def _route(self, ask: AdminAsk) -> Answer:
        parts = [urllib.parse.unquote(part) for part in ask.path.strip("/").split("/")]
        for template, acts in self.table.items():
            named = match(template, parts)
            if named is not None:
                act = acts.get(ask.method)
                return not_allowed(ask, acts) if act is None else act(ask.body, *named)
        return error_answer(f"there is no {ask.path}", 404)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _workers(self, _: bytes) -> Answer:
        now_s = self._clock()
        return json_answer({"workers": [worker.to_dict(now_s) for worker in self._plane.desk.table]})

    def _worker(self, _: bytes, name: str) -> Answer:
        return json_answer(self._find(name).to_dict(self._clock()))

    def _find(self, name: str) -> Worker:
        """Raises WorkerError where there is none."""
        return self._plane.desk.table.find(name)

    def _add(self, body: bytes) -> Answer:
        address = parse_url(msgspec.json.decode(body, type=NewWorker).url)
        return self._changed(self._plane.desk.table.add(address, self._clock()))

    def _remove(self, _: bytes, name: str) -> Answer:
        worker = self._find(name)
        self._plane.desk.table.drain(worker, self._clock(), then_remove=True)
        return self._changed(worker, removed=worker.url)

    def _drain(self, _: bytes, name: str) -> Answer:
        worker = self._find(name)
        self._plane.desk.table.drain(worker, self._clock())
        return self._changed(worker)

    def _undrain(self, _: bytes, name: str) -> Answer:
        worker = self._find(name)
        self._plane.desk.table.undrain(worker, self._clock())
        return self._changed(worker)

    def _changed(self, worker: Worker, *, removed: str | None = None) -> Answer:
        now_s = self._clock()
        self._plane.wish(removed=removed)
        self._plane.desk.pump(now_s)
        return json_answer(worker.to_dict(now_s), 202)

    # -- what became of requests -------------------------------------------------------------------------------------

    def _ledger(self, _: bytes) -> Answer:
        audit = self._plane.desk.ledger.audit(self._clock())
        told = dataclasses.asdict(audit) | {"balanced": audit.balanced}
        return json_answer(told, 200 if audit.balanced else 500)

    def _explain(self, _: bytes, rid: str) -> Answer:
        told = self._plane.desk.stories.explain(rid)
        if told is None:
            return error_answer(f"request {rid!r} is not known (any more)", 404)
        return json_answer(told)
