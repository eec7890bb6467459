"""Flags of SGLang's own router, sgl-router, as ours: whoever changes over keeps a command line that works.

``ALIASES`` is all of it; docs/guide/from-sgl-router.md shows it. Each one that is used is noted in the log.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from pla_sglang.common.cli import parse_number
from pla_sglang.common.errors import ConfigError


class Takes(enum.Enum):
    """The values after a flag of sgl-router."""

    NOTHING = "nothing"
    ONE = "one"
    MANY = "many"
    FIRST = "first"  # and further ones, which are not needed here


@dataclasses.dataclass(frozen=True)
class Alias:
    """``flag`` of sgl-router is ``ours``; empty: nothing has to be said here.

    ``words``: its values that have another name here; an empty one stands for the flag not given. ``scale``: of a
    number, such as 1000 from seconds to milliseconds.
    """

    flag: str
    ours: str
    takes: Takes = Takes.ONE
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scale: int = 1
    why: str = ""

    def convert(self, value: str) -> str:
        if value in self.words:
            return self.words[value]
        number = parse_number(value)
        return value if self.scale == 1 or isinstance(number, str) else f"{number * self.scale:g}"


POLICIES = {
    "cache_aware": "cache-aware",
    "power_of_two": "two-choices",
    "random": "two-choices",
    "round_robin": "round-robin",
}
ALIASES = (
    Alias("--worker-urls", "--worker", Takes.MANY),
    Alias("--policy", "--policy", words=POLICIES),
    Alias("--pd-disaggregation", "", Takes.NOTHING, why="each server is asked for its kind"),
    Alias("--prefill", "--worker", Takes.FIRST, why="the server is asked for its bootstrap port"),
    Alias("--decode", "--worker"),
    Alias("--max-payload-size", "--max-body-bytes"),
    Alias("--request-timeout-secs", "--request-timeout-s"),
    Alias("--shutdown-grace-period-secs", "--drain-timeout-s"),
    Alias("--max-concurrent-requests", "--max-open-requests", words={"-1": ""}, why="those that wait count"),
    Alias("--queue-size", "--max-queued-requests"),
    Alias("--queue-timeout-secs", "--pending-timeout-ms", scale=1000),
    Alias("--health-check-interval-secs", "--health-interval-ms", scale=1000),
    Alias("--health-check-timeout-secs", "--health-timeout-ms", scale=1000),
    Alias("--cb-failure-threshold", "--breaker-failures"),
    Alias("--tokenizer-path", "--tokenizer", why="for lengths of prompts"),
    Alias("--client-cert-path", "--worker-cert-path"),
    Alias("--client-key-path", "--worker-key-path"),
)
ABSENT = {  # flags of sgl-router without a counterpart -> why, or what to do
    ("--prefill-policy", "--decode-policy"): "one --policy chooses both",
    ("--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold"): "constants here",
    ("--eviction-interval-secs", "--max-tree-size"): "the index of prefixes follows the size of each KV cache",
    ("--prometheus-port", "--prometheus-host"): "/metrics is on the router's own port",
    ("--log-level", "--log-dir"): "state changes go to stderr; requests with --access-log FILE",
    ("--worker-startup-timeout-secs", "--worker-startup-check-interval"): "a server that is not up yet is waited for",
    ("--retry-max-retries", "--disable-retries"): "see --connect-attempts, --transfer-attempts, --full-attempts",
    ("--rate-limit-tokens-per-second",): "see --max-open-requests and --max-ttft-ms",
    ("--service-discovery", "--selector"): "--worker-service NAMESPACE/NAME follows a Service of Kubernetes",
    ("--ca-cert-paths",): "--worker-ca FILE, one file with all certificates",
    ("--dp-aware",): "the server chooses the rank",
    ("--enable-igw",): "one model, with its LoRA adapters",
    ("--request-id-headers",): "the answer's x-request-id",
    (
        "--reasoning-parser",
        "--tool-call-parser",
        "--chat-template",
    ): "flags of the servers; the router parses no answers",
    ("--history-backend", "--mcp-config-path"): "not supported",
}
_ALIASES = {alias.flag: alias for alias in ALIASES}
_ABSENT = {flag: why for flags, why in ABSENT.items() for flag in flags}


def translate_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with our flags, and a note on each flag that was another. Raises ConfigError."""
    ours, notes = list[str](), list[str]()
    for flag, values, joined in _split_flags(argv):
        if flag in _ABSENT:
            raise ConfigError(f"unknown argument {flag!r}, of sgl-router: {_ABSENT[flag]}")
        words = [f"{flag}={values[0]}", *values[1:]] if joined else [*([flag] if flag else []), *values]
        alias = _ALIASES.get(flag)
        if alias is None or (alias.flag == alias.ours and not alias.words.keys() & set(values)):
            ours += words
            continue
        taken = _as_ours(alias, values)
        ours += taken
        notes.append(_describe(alias, values, taken))
    return ours, list(dict.fromkeys(notes))


def _describe(alias: Alias, values: Sequence[str], taken: Sequence[str]) -> str:
    """Without values but those that have another name: an address may hold a password."""
    why = f": {alias.why}" if alias.why else ""
    if not alias.words.keys() & set(values):
        return f"{alias.flag} of sgl-router is taken as {alias.ours or 'nothing'}{why}"
    return f"{' '.join([alias.flag, *values])} of sgl-router is taken as {' '.join(taken) or 'nothing'}{why}"


def _as_ours(alias: Alias, values: Sequence[str]) -> list[str]:
    """Raises ConfigError where the flag lacks its value."""
    if alias.takes is Takes.NOTHING:
        return list(values)
    kept = values[:1] if alias.takes is Takes.FIRST else values
    if not kept and alias.takes is not Takes.MANY:
        raise ConfigError(f"{alias.flag} wants a value")
    converted = [alias.convert(value) for value in kept]
    return [alias.ours, *converted] if any(converted) else []


def _split_flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str], bool]]:
    """Each flag with what follows it, and whether its first value came with ``=``. What precedes all has none."""
    flag, values, joined = "", list[str](), False
    for word in argv:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag or values:
            yield flag, values, joined
        flag, joined, value = word.partition("=")[0], "=" in word, word.partition("=")[2]
        values = [value] if joined else []
    if flag or values:
        yield flag, values, joined
