"""Run a function in a forked copy of this process, for what changes a process for good, such as SGLang's hooks."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_fork(function: Callable[[], Any], *, as_child: bool = True) -> Any:
    """What ``function`` returns (anything that pickles), or the SystemExit that it raised.

    Args:
        as_child: the copy knows that it is a child of another process, as SGLang's schedulers do.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def body() -> None:
        if not as_child:
            multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        try:
            answer = function()
        except SystemExit as stop:
            answer = stop
        except BaseException:
            answer = AssertionError(traceback.format_exc())
        sender.send(answer)
        sender.close()
        os._exit(0)  # no clean-up of what the copy shares with its original

    process = context.Process(target=body)
    process.start()
    sender.close()
    answer = receiver.recv() if receiver.poll(120) else AssertionError("the forked process does not answer")
    process.kill()
    process.join()
    if isinstance(answer, AssertionError):
        raise answer
    return answer
