"""How much longer than in the order of their arrival infeasible requests wait (our rule, not a paper's).

An engine that starts prefills in the order of their arrival starts one when as many have started since it came as
waited before it. Whatever the order is, memory and decodes slow down all starts. So the turn of a request has come when
that many have started, and the wait until then, with its own prefill, is about what first come first served would have
cost it on this engine at this load. It needs no constant and no forecast.

An infeasible request is deferred for at most ``SloKnobs.fcfs_times`` that wait, or its TTFT target where that is
longer. From then on it is *overtaken*, and overtaken requests go first. Their bound grows with the load, so they need
no share that limits them. With R times as much as can be served, the turn of who comes at time a is at R * a, and m
times that wait ends at a * (1 + m * (R - 1)). A part x of the engine serves those in time. R - x is deferred, and 1 - x
is left for them, over a longer time:

    (R - x) / (1 + m * (R - 1)) = 1 - x     gives     1 - x = 1 / m     whatever R is

So under an overload that lasts, of any size, the bound costs 1 / m of what can be served. And no rule can bound all
waits by m times those of first come first served for less: all this follows from who has to be served by when.
"""

from __future__ import annotations

from collections import deque

from pla_sglang.policy.interface.prefill import WaitingView


class ArrivalOrder:
    """Tells whose turn to start it would be in the order of arrival. A few operations a request, none that grow.

    Who leaves the queue without a start counts until the next pass as if it waited still.
    """

    def __init__(self) -> None:
        self._started = self._waiting = 0
        self._turns = deque[tuple[int, WaitingView]]()  # each with the starts before it

    def on_arrival(self, view: WaitingView) -> None:
        self._turns.append((self._started + self._waiting, view))
        self._waiting += 1

    def on_pass(self, started: int, waiting: int) -> list[WaitingView]:
        """A pass starts so many, and leaves so many. Whose turn it was, in order of arrival."""
        self._started += started
        self._waiting = waiting
        come = list[WaitingView]()
        while self._turns and (self._turns[0][0] < self._started or not waiting):
            come.append(self._turns.popleft()[1])
        return come
