"""SGLang's parser over command lines of servers: ``support.parse_servers ARGUMENTS...``, each a JSON array."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from pla_sglang.launch_server import with_model
from pla_sglang.sim.emulate.arguments import with_emulation


def main(command_lines: Sequence[str]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    for arguments in map(json.loads, command_lines):
        print(arguments, flush=True)
        prepare_server_args(with_model(with_emulation(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
