"""Under which flags requests move: one setting with full caches and forced retraction, and five others."""

from __future__ import annotations

import dataclasses
import json

from pla_sglang.common.errors import ConfigError

CHAIN, DEMO = "chain", "demo"
MODELS = (CHAIN, DEMO)
ENGINES = 2
PROFILE, KV_GBPS = "h100-llama3.1-8b-tp1", 100.0
CHAIN_FLAGS = (
    *("--pla-emulate", PROFILE, "--pla-emulate-kv-gbps", f"{KV_GBPS:g}"),
    *("--json-model-override-args", json.dumps({"chain_answers": "text", "chain_check_prefixes": True})),
)
DEMO_FLAGS = ("--device", "cpu", "--dtype", "float32")
COMMON_FLAGS = ("--enable-metrics", "--log-level", "warning", "--router", "none")
ROOM = ("--max-total-tokens", "24576")


@dataclasses.dataclass(frozen=True)
class Setting:
    """``flags``: of every engine; ``env``: its environment; ``router``: requests go through a router that drains one
    instance after the other, and are not ordered about by the bench."""

    name: str
    requests: int
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    router: bool = False

    def engine_flags(self, model: str) -> list[str]:
        """Of ``launch_cluster`` for ``ENGINES`` engines of ``model``."""
        own = CHAIN_FLAGS if model == CHAIN else DEMO_FLAGS
        return ["--stateless", str(ENGINES), *COMMON_FLAGS, *own, *self.flags]


RETRACT = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "40"))
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "small",
            3000,
            (
                "--chunked-prefill-size",
                "256",
                "--max-total-tokens",
                "5120",
                "--pla-hold-share",
                "0.5",
                "--num-reserved-decode-tokens",
                "64",
            ),
            RETRACT,
        ),
        Setting(
            "mixed",
            500,
            (*ROOM, "--prefill-disagg", "temporal", "--enable-mixed-chunk", "--chunked-prefill-size", "128"),
        ),
        Setting("no_overlap", 500, (*ROOM, "--disable-overlap-schedule", "--stream-interval", "3")),
        Setting("page16", 500, (*ROOM, "--page-size", "16", "--chunked-prefill-size", "64")),
        Setting("tp2", 500, (*ROOM, "--tp-size", "2")),
        Setting("router", 500, (*ROOM, "--chunked-prefill-size", "256"), router=True),
    )
}


def choose_settings(named: str | None) -> list[Setting]:
    """Those of a comma-separated list, or all. Raises ConfigError."""
    names = list(SETTINGS) if named is None else [name for name in named.split(",") if name]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise ConfigError(f"--settings {unknown[0]!r} is not known; allowed: {', '.join(SETTINGS)}")
    if not names:
        raise ConfigError(f"--settings names none; allowed: {', '.join(SETTINGS)}")
    return [SETTINGS[name] for name in names]
