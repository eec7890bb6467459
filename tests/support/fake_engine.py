"""In place of an engine: a process that is healthy at its port, or ends at once.

That is with ``--fail``, and with ``--fail-on-node N`` on the node of this number.
"""

from __future__ import annotations

import argparse
import http.server
import sys


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--fail-on-node", type=int)
    options, _ = parser.parse_known_args()
    if options.fail or options.fail_on_node == options.node_rank:
        sys.exit("error: this engine was told to fail")
    http.server.ThreadingHTTPServer((options.host, options.port), Healthy).serve_forever()


if __name__ == "__main__":
    main()
