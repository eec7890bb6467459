"""Starts the processes of a router, restarts those that end by themselves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from pla_sglang.common.cli import Settings
from pla_sglang.fleet.reserved import make_router_key
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.process.child import Child
from pla_sglang.fleet.router.process.leadership import CHECK_S, Leadership
from pla_sglang.fleet.router.process.process_main import Stop, until_first

STOP_GRACE_S = 5.0


async def supervise_processes(config: RelayConfig, relays: int, settings: Settings, *, standby: bool = False) -> int:
    """Run ``relays`` relays, and the control plane with its part of ``settings``, until a signal. Returns the exit
    status. ``standby``: a second control process waits to take over."""
    stop = Stop(watch_stdin=False, pause_s=config.drain_pause_s)
    with tempfile.TemporaryDirectory(prefix="pla_router.") as folder:
        address = str(Path(folder) / "control")
        # Relays name instances by number, so a control plane that is started again must know who had which.
        given = {"memory-file": ("--memory-file", str(Path(folder) / "memory.json")), **settings.given}
        common = {"address": address, "given": given}
        # One key for this start: instances know it also after the control plane was started again.
        of_control = {**common, "router_key": make_router_key(), "relays": relays, "standby": standby}
        leadership = Leadership()
        names = ("control process 1", "control process 2") if standby else ("the control plane",)
        controls = [Child(name, "control", of_control, leadership) for name in names]
        members = [
            Child(f"relay {number}", "relay", {"number": number, "port": config.port, **common})
            for number in range(relays)
        ]
        keeping = {asyncio.ensure_future(child.keep_running()) for child in (*controls, *members)}
        watching = {asyncio.ensure_future(watch_silence(leadership))} if standby else set()
        stopped = asyncio.ensure_future(stop.asked.wait())
        done, _ = await asyncio.wait({*keeping, stopped}, return_when=asyncio.FIRST_COMPLETED)
        failed = [task.result() for task in done - {stopped}]  # a child that refuses its settings
        if config.drain_pause_s:
            for child in members:
                child.send_sigterm()  # the first of two: it is not ready any more
        if not failed:
            await stop.wait_pause()
        drain_s = 0.0 if failed else config.drain_timeout_s
        ends = asyncio.gather(*(child.stop_child(drain_s + STOP_GRACE_S) for child in members))
        await until_first(ends, stop.forced.wait())
        leadership.end_leadership()
        await asyncio.gather(*(control.stop_child(STOP_GRACE_S) for control in controls))
        tasks = (*keeping, *watching, stopped)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return failed[0] if failed else 0


async def watch_silence(leadership: Leadership) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        leadership.check_silence()
