"""The time between two tokens of a request, from the passes that gave them."""

from __future__ import annotations

from pla_sglang.load.window import WindowMean


class TokenIntervals:
    """Mean over the tokens of the last ``window_s`` seconds.

    Requests that decode together get their tokens at the same times, so a pass is counted once, by the number of its
    decodes. Those that had their first token since the last such pass have waited from that token on, the others since
    the last pass.
    """

    def __init__(self, window_s: float) -> None:
        self._mean = WindowMean(window_s)
        self._last_s: float | None = None  # of the last pass that gave decodes a token
        self._newcomers: list[tuple[float, int]] = []  # first tokens since then: when, and to how many

    def on_first_tokens(self, requests: int, now_s: float) -> None:
        """A prefill has ended for ``requests`` that go on to decode here."""
        if requests:
            self._newcomers.append((now_s, requests))

    def on_decoded(self, requests: int, now_s: float) -> None:
        """A pass, mixed or not, has given ``requests`` decodes a token each."""
        if not requests:
            return
        others = requests
        for first_s, count in self._newcomers:
            joined = min(count, others)
            others -= joined
            if joined:
                self._mean.add(now_s - first_s, now_s, weight=joined)
        if others and self._last_s is not None:
            self._mean.add(now_s - self._last_s, now_s, weight=others)
        self._newcomers.clear()
        self._last_s = now_s

    def on_idle(self) -> None:
        """Nothing decodes: what comes next has not waited since the last token."""
        self._last_s = None
        self._newcomers.clear()

    def mean(self, now_s: float) -> float | None:
        """None without tokens in the window."""
        return self._mean.mean(now_s)
