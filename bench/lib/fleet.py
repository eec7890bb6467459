"""All arms of a comparison: started together, one awake at a time, stopped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.lib.arms import Arm, memory_flags, platform_overlay
from bench.lib.client import Client
from bench.lib.report import say
from bench.lib.server import PausableServer, ServerError

_WAKE_SETTLE_S = 0.2
_STOP_TIMEOUT_S = 3.0  # nothing is left to drain when a bench stops its servers


@dataclass(slots=True)
class Member:
    arm: Arm
    server: PausableServer
    client: Client
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def version(self) -> str:
        return str(self.info.get("version", "unknown"))

    @property
    def kv_tokens(self) -> int | None:
        return self.info.get("max_total_num_tokens")

    @property
    def hooks(self) -> Any:
        """Hook status as our plugin reports it; None for a server without it."""
        states = self.info.get("internal_states") or [{}]
        block = states[0].get("pla") if isinstance(states[0], dict) else None
        return block.get("hooks") if isinstance(block, dict) else block


class Fleet:
    """``async with Fleet(arms, ...) as fleet:`` starts all servers and freezes them; leaving stops them all."""

    def __init__(
        self,
        arms: Sequence[Arm],
        shared_flags: Sequence[str],
        *,
        device: str,
        log_dir: Path,
        start_timeout_s: float = 600.0,
        request_timeout_s: float = 300.0,
    ) -> None:
        self._device = device
        self._log_dir = log_dir
        self._stack = contextlib.AsyncExitStack()
        self._overlay = tempfile.TemporaryDirectory(prefix="pla-bench-")
        log_dir.mkdir(parents=True, exist_ok=True)
        self.members: list[Member] = []
        for position, arm in enumerate(arms):
            server = PausableServer(
                None,
                # The arm's own flags come last: argparse lets the last one win.
                [*shared_flags, *memory_flags(device, position, len(arms)), *arm.flags],
                module=arm.module,
                python=arm.python,
                env={"HF_HUB_OFFLINE": "1", **self._overlay_env(arm), **arm.env},
                start_timeout_s=start_timeout_s,
                stop_timeout_s=_STOP_TIMEOUT_S,
                log_path=log_dir / f"server-{arm.name}.log",
            )
            client = Client(server.url, timeout_s=request_timeout_s)
            self.members.append(Member(arm, server, client))

    def _overlay_env(self, arm: Arm) -> dict[str, str]:
        if not arm.foreign_python or self._device != "cpu":
            return {}
        return platform_overlay(Path(self._overlay.name) / arm.name)

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _start(self) -> None:
        started_s = time.monotonic()
        say(f"starting {', '.join(member.name for member in self.members)} (logs in {self._log_dir})")
        # On a GPU one by one, because each sizes its KV pool by the memory it finds free. On a CPU a few at a time.
        slots = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 2) if self._device == "cpu" else 1)
        try:
            async with asyncio.TaskGroup() as group:
                for member in self.members:
                    group.create_task(self._start_one(member, slots))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it
        say(f"all ready after {time.monotonic() - started_s:.0f} s")
        self._warn_of_unequal_pools()

    async def _start_one(self, member: Member, slots: asyncio.Semaphore) -> None:
        async with slots:
            member.server.start()
            await asyncio.to_thread(member.server.wait_ready)
            await self._stack.enter_async_context(member.client)
            member.info = await member.client.get_json("/server_info")
            member.server.pause()  # at once: a ready server polls, and would slow down those that still start
        say(f"{member.name} is ready")

    def _warn_of_unequal_pools(self) -> None:
        pools = {member.name: member.kv_tokens for member in self.members if member.kv_tokens}
        if pools and max(pools.values()) > 1.02 * min(pools.values()):
            say(f"WARNING: the KV pools differ: {pools}; give all the same with --kv-tokens")

    async def _close(self) -> None:
        try:
            await self._stack.aclose()
        finally:
            # Shielded: a second Ctrl-C must not leave a server behind.
            await asyncio.shield(asyncio.gather(*(asyncio.to_thread(m.server.stop) for m in self.members)))
            self._overlay.cleanup()

    @contextlib.asynccontextmanager
    async def awake(self, member: Member) -> AsyncIterator[Client]:
        """Only this server runs inside the block. Its prefix cache is empty.

        Raises:
            ServerError: the server is dead, or something still runs in it.
        """
        member.server.resume()
        try:
            if not await member.client.flush_cache():
                raise ServerError(
                    f"{member.name} is dead or still busy: it does not flush its cache; the end of its log:\n"
                    f"{member.server.log_tail()}"
                )
            await asyncio.sleep(_WAKE_SETTLE_S)
            yield member.client
        finally:
            member.server.pause()

    async def refresh_info(self, member: Member) -> dict[str, Any]:
        """Counters as they are now. The server has to be awake."""
        member.info = await member.client.get_json("/server_info")
        return member.info
