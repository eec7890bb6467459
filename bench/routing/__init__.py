"""Parts of ``bench.router_cost``: instances and clients that are much cheaper than any router, and what is measured."""
