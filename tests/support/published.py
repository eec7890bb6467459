"""SGLang's arguments where its own functions look for them, for tests that make parts of a server in their process."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_context


def publish_arguments(**fields: Any) -> Any:
    """Those of a server with ``fields`` and no model. The last that were published count.

    The fixture ``published`` takes them back.
    """
    return get_context().override_server_args(**fields).install()
