"""One table of colours for everything that is drawn: pages, and the pictures of benches."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.interface.fleet import Role

# Okabe-Ito: told apart by colour-blind readers too. Stock is grey: it is the background of the comparison.
STOCK_COLOUR = "#7f7f7f"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
REASON_COLOUR = "#5b7fa6"
NOT_READY_COLOUR = "#bdbdbd"
TARGET_COLOUR = "#c0392b"

# Roles keep these in every picture, whatever else is drawn in it.
ROLE_COLOURS: Mapping[Role, str] = {
    Role.PREFILL: COLOURS[0],
    Role.DECODE: COLOURS[1],
    Role.MIXED: COLOURS[2],
    Role.PREFILL_TO_DECODE: COLOURS[5],
    Role.DECODE_TO_PREFILL: COLOURS[4],
}

# States of an instance that gets nothing new, by their names in router and recordings.
STATE_COLOURS: Mapping[str, str] = {
    "starting": NOT_READY_COLOUR,
    "suspect": TARGET_COLOUR,
    "draining": "#8a8a8a",
    "drained": "#6b6b6b",
    "dead": "#4d4d4d",
}
# Pools of prompts by length; "both" where an instance takes all. No role has these.
CLASS_COLOURS: Mapping[str, str] = {"short": "#CCBB44", "long": "#AA3377", "both": "#9aa7b8"}

# Of a planner: what it wants and expects, beside what is there.
PLAN_COLOURS: Mapping[str, str] = {
    "ready": REASON_COLOUR,
    "starting": STATE_COLOURS["starting"],
    "draining": STATE_COLOURS["draining"],
    "planned": "#AA3377",
    "load": "#7f8fa6",
    "forecast": "#228833",
}

# Policies on a page: none is a role's colour. Readable on light and dark ground; Tol's "bright".
POLICY_COLOURS = ("#AA3377", "#228833", "#4477AA", "#EE6677", "#CCBB44", "#66CCEE", "#BBBBBB")

# Where the time of a request goes, in this order.
STAGE_COLOURS: Mapping[str, str] = {
    "waiting": "#9aa7b8",
    "prefill": ROLE_COLOURS[Role.PREFILL],
    "hand-off": COLOURS[3],
    "decode": ROLE_COLOURS[Role.DECODE],
}
