"""What can be seen of an engine from outside: its view, its token intervals, its running requests, as of now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pla_sglang.sim.request import SimRequest

if TYPE_CHECKING:
    from pla_sglang.sim.instance import Instance


def report(instance: Instance, grown_tokens: int = 0) -> None:
    """Decode figures of the view; ``grown_tokens`` were added by steps that are not settled yet."""
    view, running = instance.view, instance.running
    view.running = len(running) + len(instance.joining)
    view.context_tokens = running.context_tokens + grown_tokens
    for request in instance.joining:
        view.context_tokens += request.context_tokens
    view.kv_used_tokens = instance.pool.used_tokens + grown_tokens


def sync(instance: Instance, now_s: float) -> None:
    """The whole view as of now. Settles nothing, so that looking changes nothing."""
    view, decoding = instance.view, instance.decoding
    report(instance, decoding.steps_now(now_s) * len(decoding.running))
    heads = [waiting.arrival_s for waiting in instance.queue.waiting[:1]]
    if instance.queue.chunk is not None:
        heads.append(instance.queue.chunk.arrival_s)
    view.prefill_age_s = now_s - min(heads) if heads else 0.0
    open_s = 0.0
    if instance.under_way is not None:
        open_s = now_s - instance.under_way.started_s
    elif decoding.segment is not None:
        open_s = now_s - decoding.start_s
    view.utilisation = decoding.meter.utilisation(now_s, open_s)


def interval_s(instance: Instance, now_s: float) -> float | None:
    """Mean token interval since the last call; None without tokens."""
    decoding = instance.decoding
    if decoding.segment is None:
        return decoding.meter.interval_s()
    steps = decoding.steps_now(now_s)
    return decoding.meter.interval_s(steps, decoding.start_s + decoding.segment.end_s(steps))


def rows(instance: Instance, now_s: float) -> list[tuple[SimRequest, int, int]]:
    """Running requests with their KV tokens and their answer tokens now."""
    steps, running = instance.decoding.steps_now(now_s), instance.running
    done = [(request, running.done_of(request, steps)) for request in running.members]
    return [(request, request.input_tokens + tokens - 1, tokens) for request, tokens in done]
