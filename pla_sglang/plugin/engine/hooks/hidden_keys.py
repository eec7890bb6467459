"""What a server tells of its arguments, in ``/server_info`` and in its log, without its keys.

SGLang shows all of them: who holds the key of clients reads the admin key, and who reads the log reads both. So this is
on wherever the plugin is, whatever else of ours is off: nobody needs these values from there, and every member stays,
with ``HIDDEN`` in place of a secret that is set.
"""

from __future__ import annotations

from typing import Any

from pla_sglang.common.secret_names import hide_secrets
from pla_sglang.plugin.engine.host.arguments import read_fields


def after_repr(text: str, server_args: Any) -> str:
    """The line ``server_args=ServerArgs(...)`` of the log."""
    for name, value in read_fields(server_args).items():
        hidden = hide_secrets({name: value})[name]
        if hidden != value:
            text = text.replace(f"{name}={value!r}", f"{name}={hidden!r}")
    return text


def after_resolved_config_dict(arguments: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments in ``/server_info``, and in the log of versions that log them as resolved."""
    hidden: dict[str, Any] = hide_secrets(arguments)
    return hidden


async def around_get_internal_state(original: Any, manager: Any) -> list[dict[str, Any]]:
    """``internal_states`` there: each scheduler repeats its arguments. They also say that the host is untested."""
    from pla_patches import host

    states = [hide_secrets(state) for state in await original(manager)]
    if note := host.untested_note():
        for state in states:
            state.setdefault("pla", {})["untested"] = note
    return states
