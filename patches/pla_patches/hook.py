"""The one hook of ours around a target in this process: it calls the active subscribers in the order of the table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pla_patches.seam import Hook, Seam, Subscriber

Handler = Callable[..., Any]

HOOKS: dict[str, TargetHook] = {}  # of this process, by target


class TargetHook:
    """SGLang's registry wraps the target in it, as an "around" hook. Subscribers may also be added afterwards."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam  # with every subscriber that the table has for the target
        self.handlers: dict[str, Handler] = {}  # active, by id
        self._before: list[Handler] = []
        self._around: list[Handler] = []  # innermost first
        self._after: list[Handler] = []

    def activate(self, handlers: Mapping[str, Handler]) -> None:
        """Call these subscribers, by id, beside those that are active."""
        self.handlers.update(handlers)
        active = [subscriber for subscriber in self.seam.subscribers if subscriber.id in self.handlers]
        self._before = self._of_type(active, Hook.BEFORE)
        self._around = self._of_type(active, Hook.AROUND)[::-1]
        self._after = self._of_type(active, Hook.AFTER)

    def _of_type(self, active: list[Subscriber], hook: Hook) -> list[Handler]:
        return [self.handlers[subscriber.id] for subscriber in active if subscriber.hook is hook]

    def calls(self, handler: Handler) -> bool:
        return handler in (*self._before, *self._around, *self._after)

    def __call__(self, original: Handler, /, *args: Any, **kwargs: Any) -> Any:
        """A "before" may return other arguments, an "after" another result; None leaves them as they are."""
        for before in self._before:
            changed = before(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
        for around in self._around:
            original = functools.partial(around, original)
        result = original(*args, **kwargs)
        for after in self._after:
            changed = after(result, *args, **kwargs)
            if changed is not None:
                result = changed
        return result
