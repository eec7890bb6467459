"""Times single prefill passes of a real SGLang scheduler inside this process, without HTTP and without other processes.

The host's own scheduling, memory, model and sampler; only the loop that calls them is ours. One scheduler a process.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

from pla_sglang.plugin.config import PlaConfig
from pla_sglang.testing.scheduler import build_scheduler, make_request

MOST_PASSES = 10_000  # a loop that runs longer is stuck


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """A batch to time: new tokens of each request, and its history tokens in the prefix cache."""

    new_tokens: tuple[int, ...]
    history_tokens: int = 0

    @property
    def name(self) -> str:
        return f"{len(self.new_tokens)} x {sum(self.new_tokens) / len(self.new_tokens):.0f} + {self.history_tokens}"


@dataclasses.dataclass(frozen=True)
class Pass:
    """One prefill pass: its duration, content and first tokens."""

    seconds: float
    requests: int
    new_tokens: int
    first_tokens: tuple[int, ...]


class Stepper:
    """A scheduler for launcher ``arguments``, and passes through it.

    Raises HostMismatchError if a seam that ``config`` needs does not fit.
    """

    def __init__(self, arguments: Sequence[str], config: PlaConfig, *, seed: int = 0) -> None:
        started_s = time.perf_counter()
        self.scheduler = build_scheduler(arguments, config)
        self.start_s = time.perf_counter() - started_s
        self._rng = random.Random(seed)
        self._made = 0
        self._decodes: list[tuple[int, float]] = []  # requests and seconds of each decode step
        import torch

        self._device = torch.get_device_module(self.scheduler.device)

    # -- requests --------------------------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        vocabulary = min(self.scheduler.model_config.vocab_size, 10_000)
        return [self._rng.randrange(3, vocabulary) for _ in range(count)]

    def _request(self, prompt: Sequence[int], new_tokens: int) -> Any:
        self._made += 1
        return make_request(self.scheduler, f"s{self._made}", prompt, new_tokens)

    # -- passes ----------------------------------------------------------------------------------------------------

    def run(self, prompts: Sequence[Sequence[int]]) -> list[Pass]:
        """Answer ``prompts`` with one token each; they wait together. Every prefill pass that it took, in order."""
        return self._serve([self._request(prompt, 1) for prompt in prompts])

    def answers(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers of so many tokens, in the order of ``prompts``; they wait together."""
        requests = [self._request(prompt, new_tokens) for prompt in prompts]
        self._serve(requests)
        return [list(request.output_ids) for request in requests]

    def time_decodes(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
        """Seconds of each decode step that all of ``prompts`` took together, until they have so many tokens each."""
        self._decodes.clear()
        self.answers(prompts, new_tokens)
        return [seconds for requests, seconds in self._decodes if requests == len(prompts)]

    def _serve(self, requests: Sequence[Any]) -> list[Pass]:
        import torch

        for request in requests:
            self.scheduler._add_request_to_queue(request)
        with torch.no_grad():  # as in the host's own loops
            return self._drain()

    def _drain(self) -> list[Pass]:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        scheduler = self.scheduler
        passes = []
        for _ in range(MOST_PASSES):
            if hasattr(scheduler, "pla"):  # the clock comes with received requests, and nothing is received here
                scheduler.pla.now_s = time.perf_counter()
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
            if batch:
                new_tokens, requests = batch.extend_num_tokens, len(batch.reqs)
                self._device.synchronize()
                started_s = time.perf_counter()
                result = scheduler.run_batch(batch)
                self._device.synchronize()
                seconds = time.perf_counter() - started_s
                first = tuple(int(token) for token in result.next_token_ids)
                if batch.forward_mode == ForwardMode.EXTEND:
                    passes.append(Pass(seconds, requests, new_tokens, first))
                elif batch.forward_mode == ForwardMode.DECODE:
                    self._decodes.append((requests, seconds))
                scheduler.process_batch_result(batch, result)
            scheduler.last_batch = batch
            idle = not batch and scheduler.running_batch.is_empty() and scheduler.chunked_req is None
            if idle and not scheduler.waiting_queue:
                return passes
        raise RuntimeError(f"not done after {MOST_PASSES} passes")

    def idle(self) -> None:
        """What the host does between requests; graphs that were missed are captured here."""
        import torch

        with torch.no_grad():
            self.scheduler.on_idle()

    def time_shape(self, shape: BatchShape, *, rounds: int) -> list[Pass]:
        """Passes of this shape, one a round, each with tokens of its own. The history is computed before, once.

        Raises ValueError if a batch needs more than one pass.
        """
        histories = [self.tokens(shape.history_tokens) for _ in shape.new_tokens]
        if shape.history_tokens:
            self.run(histories)
        found = []
        for _ in range(rounds):
            pairs = zip(histories, shape.new_tokens, strict=True)
            passes = self.run([history + self.tokens(new) for history, new in pairs])
            expected = sum(shape.new_tokens)
            # The first tokens of a prompt may happen to be cached; a few of many do no harm.
            if len(passes) != 1 or not 0.9 * expected <= passes[0].new_tokens <= expected:
                took = [(one.requests, one.new_tokens) for one in passes]
                raise ValueError(f"{shape.name}: passes of (requests, new tokens) {took}, expected one of {expected}")
            found += passes
        return found

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def graphs(self) -> dict[str, Any]:
        """State of our graphs (empty without graphs), and the host's figures about its own prefill graphs."""
        runner = self.scheduler.tp_worker.model_runner
        ours = runner.prefill_cuda_graph_runner
        state = ours.state() if hasattr(ours, "pla_layout") else {}
        seconds, gib = runner.graph_time_usage.get("prefill", 0.0), runner.graph_memory_usage.get("prefill", 0.0)
        return {"ours": state, "prefill_capture_s": round(seconds, 3), "prefill_bytes": int(gib * (1 << 30))}
