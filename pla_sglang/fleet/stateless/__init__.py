"""A stateless instance (Arrow, arXiv 2505.11916, section 5.1): one engine that serves either phase of any request.

SGLang's aggregated loop runs as it is. Beside it stand both ends of SGLang's PD protocol on one KV pool: a sender for
requests whose prefill is wanted here, and a receiver for those whose decode is. A running request can be paused, and
migrates to another instance or is computed again there. See docs/reference/stateless.md and docs/protocol.md.

Read downwards; nothing imports what stands above it:

* ``scheduler_hooks``, ``front_hooks``: the functions that the seam table names, by process. The plugin imports nothing
  of this package: it joins a scheduler with ``fleet_part.join``, and everything else by that table.
* ``engine``: the turn of the loop. It takes what comes, and moves everything one step before each pass.
* ``requests/``: what happens to a request: it arrives, is paused, migrates, goes on; its stream; who may ask for that.
* ``transfer/``: how its KV travels: peers, rooms, both ends, when pages are free again.
* ``host/``: what all of this asks of SGLang.
"""
