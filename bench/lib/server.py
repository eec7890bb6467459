"""A server that can be frozen while another arm of the comparison runs."""

from __future__ import annotations

import contextlib
import os
import signal

from pla_sglang.testing.server import Server, ServerError

__all__ = ["PausableServer", "ServerError"]


class PausableServer(Server):
    """An idle SGLang scheduler polls without pause and takes a whole core from the arm under test.

    Measured on two cores: beside an idle server a lone long took 1.10 s instead of 0.60 s. ``pause`` stops the whole
    process group (SIGSTOP), which gives 0.60 s. SGLang's ``--sleep-on-idle`` does too, but changes the arm that is
    measured. A frozen server keeps its sockets, its memory and its prefix cache.
    """

    def pause(self) -> None:
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()  # a frozen process does not see the polite request to end
        super().stop()

    def _signal_group(self, number: signal.Signals) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
