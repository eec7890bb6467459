"""The running batch of an instance. Steps are counted, not visited: nothing here costs time per step and request."""

from __future__ import annotations

import heapq

from pla_sglang.sim.core.request import SimRequest
from pla_sglang.sim.core.token_deadlines import TokenDeadlines


class RunningBatch:
    """Requests that decode together.

    A request that joins at step counter j with r tokens left ends when the counter is j + r, so ends lie in a heap and
    a run of n steps is one addition. Entries of requests that have left stay in the heap until they come up. Likewise
    of limits: admission counts ``limit_clip_tokens`` of those of members that may get more than that.
    """

    def __init__(self, limit_clip_tokens: int) -> None:
        self.members: dict[SimRequest, None] = {}  # in order of joining
        self.step = 0  # decode steps since the start
        self.context_tokens = 0  # KV tokens of the members
        self.deadlines = TokenDeadlines(self.members)
        self._limit_clip_tokens = limit_clip_tokens
        self._limit_ends = 0  # sum of the counters at which members that count in full would reach their limits
        self._clipped: dict[SimRequest, int] = {}  # other members -> counter from which they count in full
        self._unclips: list[tuple[int, int, SimRequest]] = []  # heap of these counters
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self.members)

    def join(self, request: SimRequest) -> None:
        """``request`` decodes from the next step on; its KV is here."""
        self.members[request] = None
        request.join_step = self.step
        request.finish_step = self.step + request.output_tokens - request.done_tokens
        self.context_tokens += request.context_tokens
        self._sequence += 1
        left_tokens = request.limit_left
        if left_tokens > self._limit_clip_tokens:
            self._clipped[request] = at = self.step + left_tokens - self._limit_clip_tokens
            heapq.heappush(self._unclips, (at, self._sequence, request))
        else:
            self._limit_ends += self.step + left_tokens
        self.deadlines.add(request)
        heapq.heappush(self._ends, (request.finish_step, self._sequence, request))

    def leave(self, request: SimRequest) -> None:
        """``request`` decodes no more; its ``done_tokens`` and ``private_tokens`` are brought up to date."""
        del self.members[request]
        assert request.join_step is not None
        grown = self.step - request.join_step
        if self._clipped.pop(request, None) is None:
            self._limit_ends -= request.join_step + request.limit_left
        request.done_tokens += grown
        request.private_tokens += grown
        self.context_tokens -= request.context_tokens
        request.join_step = request.finish_step = None

    def advance(self, steps: int) -> None:
        """All members got ``steps`` tokens."""
        self.step += steps
        self.context_tokens += steps * len(self.members)

    def steps_to_end(self) -> int:
        """Steps until the next member ends. There is a member."""
        ends = self._ends
        while not self._live(ends[0]):
            heapq.heappop(ends)
        return ends[0][0] - self.step

    def ended(self) -> list[SimRequest]:
        """Members that have all their tokens, in order of joining for equal ends. They have left."""
        found: list[SimRequest] = []
        ends = self._ends
        while ends and ends[0][0] <= self.step:
            entry = heapq.heappop(ends)
            if self._live(entry):
                self.leave(entry[2])
                found.append(entry[2])
        return found

    def growth_tokens(self) -> int:
        """Tokens that members would still add if all went to their limits, as admission counts them."""
        while self._unclips and self._unclips[0][0] <= self.step:
            at, _, request = heapq.heappop(self._unclips)
            if self._clipped.get(request) == at:  # else it has left
                del self._clipped[request]
                self._limit_ends += at + self._limit_clip_tokens
        in_full = len(self.members) - len(self._clipped)
        return max(0, self._limit_ends - self.step * in_full) + self._limit_clip_tokens * len(self._clipped)

    def least_done(self) -> SimRequest:
        """Whom SGLang retracts first: the fewest answer tokens, of those the longest prompt."""
        return min(self.members, key=lambda request: (self.done_of(request), -request.input_tokens, -request.row))

    def done_of(self, request: SimRequest, steps: int = 0) -> int:
        """Answer tokens of a member, ``steps`` after the last settled step."""
        assert request.join_step is not None
        return request.done_tokens + self.step + steps - request.join_step

    def decoded_tokens(self) -> int:
        """Answer tokens of all members; O(members), for the rare retraction."""
        return sum(self.done_of(request) for request in self.members)

    def _live(self, entry: tuple[int, int, SimRequest]) -> bool:
        # A request that has moved on may have, by chance, the same step number in the batch where it is now.
        return entry[2].finish_step == entry[0] and entry[2] in self.members

    def check_integrity(self) -> None:
        """Asserts that the sums agree with the members."""
        context = sum(request.input_tokens + max(0, self.done_of(request) - 1) for request in self.members)
        assert context == self.context_tokens, f"{self.context_tokens} context tokens, members have {context}"
        in_full = [request for request in self.members if request not in self._clipped]
        limit_ends = sum((request.join_step or 0) + request.limit_left for request in in_full)
        assert self._limit_ends == limit_ends, "limits of the members"
