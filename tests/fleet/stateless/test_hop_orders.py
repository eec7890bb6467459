"""Commands as they are typed, states and their moves."""

from __future__ import annotations

from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError, IllegalMoveError
from pla_sglang.fleet.stateless.requests.commands import Command, parse_commands
from pla_sglang.fleet.stateless.transfer.exports import PAUSE_MOVES, PausedRequest, PauseState


def test_all_commands() -> None:
    body = {
        "commands": [
            {"do": "hold", "rid": "R", "room": 77, "for_s": 3},
            {"do": "hold", "rid": "R", "room": 78},
            {"do": "resume", "room": 77},
            {"do": "commit", "room": 77},
            {"do": "resume", "room": 0},
        ]
    }
    assert parse_commands(body) == (
        Command("hold", 77, "R", 3.0),
        Command("hold", 78, "R", 10.0),
        Command("resume", 77),
        Command("commit", 77),
        Command("resume", 0),
    )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (None, 'expected {"commands"'),
        ([], 'expected {"commands"'),
        ({"commands": {}}, 'expected {"commands"'),
        ({"commands": [], "more": 1}, 'expected {"commands"'),
        ({"commands": []}, "0 commands; allowed: 1 to 1000"),
        ({"commands": [{"do": "resume", "room": 1}] * 1001}, "1001 commands"),
        ({"commands": [7]}, r"commands\[0\]: do None"),
        ({"commands": [{"do": "park", "room": 1}]}, "do 'park' is not valid; allowed: hold, resume, commit"),
        ({"commands": [{"do": "commit"}]}, "commit has the members do, room"),
        ({"commands": [{"do": "commit", "room": 1, "rid": "x"}]}, "commit has the members do, room"),
        ({"commands": [{"do": "commit", "room": -1}]}, r"commands\[0\].room -1 is not valid"),
        ({"commands": [{"do": "commit", "room": True}]}, "room True is not valid"),
        ({"commands": [{"do": "commit", "room": 2**63}]}, "room 9223372036854775808 is not valid"),
        ({"commands": [{"do": "hold", "room": 1}]}, r"commands\[0\].rid None"),
        ({"commands": [{"do": "hold", "room": 1, "rid": ""}]}, r"commands\[0\].rid ''"),
        (
            {"commands": [{"do": "hold", "room": 1, "rid": "x", "for_s": 0}]},
            "for_s 0 is not valid; allowed: 0.1 to 300",
        ),
    ],
)
def test_what_is_refused(body: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_commands(body)


def test_from_everywhere_a_request_can_end() -> None:
    """No state keeps a request for ever, and none is left behind its end."""
    with pytest.raises(IllegalMoveError, match="from ended to "):
        PausedRequest(None, 7, 1.0, state=PauseState.ENDED).move(next(iter(PauseState)))
    ends = {PauseState.ENDED}
    for _ in PauseState:
        ends |= {state for state, moves in PAUSE_MOVES.items() if moves & ends}
    assert ends == set(PauseState)
