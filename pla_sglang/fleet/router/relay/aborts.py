"""Aborts that a relay sends to instances, so that they free what they hold of a request: at once, or after a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Sequence

import msgspec

from pla_sglang.fleet.router.relay.counters import Counters
from pla_sglang.fleet.router.relay.proxied_call import WholeCall
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection, UpstreamPool
from pla_sglang.fleet.router.relay.worker_directory import WorkerDirectory
from pla_sglang.fleet.router.wire.messages import Outcome

# When an abort is sent, counted from the first. One that overtakes its request on the way to an instance is lost
# (SGLang knows no such rid yet), so it is repeated. An instance that has ended the request ignores it.
ABORT_TIMES_S = (0.0, 0.25, 0.7)
ABORT_TIMEOUT_S = 5.0
# How long a prefill part may take to end its answer once decode has answered completely, by the request's outcome.
LINGER_S = {Outcome.OK: 5.0, Outcome.CLIENT_ERROR: 0.5}


class InstanceAborts:
    """``unanswered``: aborts that instances have not answered yet."""

    def __init__(self, pool: UpstreamPool, workers: WorkerDirectory, counters: Counters) -> None:
        self._pool, self._workers, self._counters = pool, workers, counters
        self.unanswered = 0

    def abort_repeatedly(self, number: int, rids: Sequence[str]) -> None:
        """Make an instance free what it holds of a request."""
        for delay_s in ABORT_TIMES_S:
            if delay_s:
                asyncio.get_running_loop().call_later(delay_s, self.send_abort, number, rids)
            else:
                self.send_abort(number, rids)

    def send_abort(self, number: int, rids: Sequence[str]) -> None:
        """Once, for each of ``rids``."""
        worker = self._workers.find_worker(number)
        if worker is None:
            return
        self.unanswered += len(rids)
        for rid in rids:
            call = WholeCall(self._pool, self._on_response, timeout_s=ABORT_TIMEOUT_S)
            call.send_request(worker, "POST", "/abort_request", msgspec.json.encode({"rid": rid}), admin=True)

    def _on_response(self, call: WholeCall) -> None:
        self.unanswered -= 1
        self._counters.count_event("upstream_aborts_total", status=str(0 if call.failure else call.status))

    async def wait_answered(self, limit_s: float) -> None:
        """Until every abort is answered, at most ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.unanswered:
                    await asyncio.sleep(limit_s / 100)


class LingeringLegs:
    """Legs that have not ended when nobody needs their answer any more: they get some time, and then they are aborted.

    Prefill parts of requests that are answered, and legs that a request has left for another instance.
    """

    def __init__(self, aborts: InstanceAborts) -> None:
        self._aborts = aborts
        # by leg: end of its time, its instance, its connection, and the ids there
        self._waiting: dict[Hashable, tuple[float, int, UpstreamConnection, Sequence[str]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add_leg(
        self, leg: Hashable, worker: int, connection: UpstreamConnection, rids: Sequence[str], *, until_s: float
    ) -> None:
        """``rids``: under which ids the instance ``worker`` knows the request."""
        self._waiting[leg] = (until_s, worker, connection, rids)

    def remove_leg(self, leg: Hashable, complete: bool) -> None:
        """Its answer has ended, or is lost."""
        self._waiting.pop(leg, None)

    def check_time_limits(self, now_s: float) -> None:
        for leg, (until_s, worker, connection, rids) in list(self._waiting.items()):
            if now_s > until_s:
                del self._waiting[leg]
                connection.drop_connection()
                self._aborts.abort_repeatedly(worker, rids)
