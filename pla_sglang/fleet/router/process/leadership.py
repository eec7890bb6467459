"""Which control process leads: the launcher's word is the lease, and its epoch grows with each appointment.

The next one is appointed when the process of the former one is gone, never before: by its own end, or by SIGKILL where
it stood still. So two never lead at once, and none that was frozen goes on later. The launcher holds all processes of
the router: when it ends, they do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pla_sglang.fleet.router.process.child import Child
from pla_sglang.fleet.router.wire.messages import HEARTBEAT_INTERVAL_S

CHECK_S = 0.1
# A take-over may last 2 s: this, a look (0.1 s), and what the next one needs (0.1 s; a loaded machine some more). The
# loop of a control process stands still for ms, and for some 0.5 s at most once, as it reads a large tokenizer. Beside
# twelve busy processes on two cores the longest time between two beats was 0.31 s, and 0.47 s of a standby.
SILENT_S = 5 * HEARTBEAT_INTERVAL_S
# Whoever is to take over must have been heard so lately itself: a machine that stands still silences both.
FRESH_S = 3 * HEARTBEAT_INTERVAL_S
STALL_S = 0.5  # between two looks: the launcher itself stood still, so nobody was heard meanwhile


class Leadership:
    """The control processes of one router (``Watcher``)."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.epoch = 0
        self._now_s = now_s
        self._heard_s: dict[Child, float | None] = {}  # those that run; None: it has not begun to beat
        self._leader: Child | None = None
        self._lost_s: float | None = None  # when the leader was heard last that is gone, or is being ended
        self._told: bool | None = None  # whether there is a standby, as the leader was told
        self._over = False
        self._checked_s = now_s()

    def on_start(self, child: Child) -> None:
        self._heard_s[child] = None
        self._appoint_next()

    def on_beat(self, child: Child) -> None:
        self._heard_s[child] = self._now_s()

    def on_end(self, child: Child) -> None:
        self._heard_s.pop(child, None)
        if child is self._leader:
            self._leader = None
            if self._lost_s is None:
                self._lost_s = self._now_s()
            self._appoint_next()

    def end_leadership(self) -> None:
        """The router ends: nobody takes over any more."""
        self._over = True

    def _appoint_next(self) -> None:
        """The one that was heard last; what starts still reads it when it has."""
        if self._leader is not None or self._over or not self._heard_s:
            return
        self._leader = leader = max(self._heard_s, key=lambda child: self._heard_s[child] or 0.0)
        self.epoch += 1
        self._told = None
        leader.send_line({"epoch": self.epoch, "lost_s": self._lost_s})
        if self.epoch > 1:
            print(f"pla_sglang: {leader.name} takes over, epoch {self.epoch}", file=sys.stderr, flush=True)
        self._lost_s = None

    def check_silence(self) -> None:
        """Called every ``CHECK_S`` where there is a standby. A leader that is silent is ended; at its end the standby
        is appointed."""
        leader, now_s = self._leader, self._now_s()
        if now_s - self._checked_s > STALL_S:
            self._heard_s = {child: None if s is None else now_s for child, s in self._heard_s.items()}
        self._checked_s = now_s
        if leader is None:
            return
        others = (heard_s for child, heard_s in self._heard_s.items() if child is not leader and heard_s is not None)
        is_ready = any(now_s - heard_s <= FRESH_S for heard_s in others)
        if is_ready is not self._told:
            self._told = is_ready
            leader.send_line({"standby": is_ready})
        heard_s = self._heard_s[leader]
        if not is_ready or heard_s is None or self._lost_s is not None or now_s - heard_s <= SILENT_S:
            return
        self._lost_s = heard_s
        text = f"{leader.name} (epoch {self.epoch}) has said nothing for {now_s - heard_s:.2f} s; it is ended"
        print(f"pla_sglang: {text}", file=sys.stderr, flush=True)
        leader.kill()
