"""Requests that move: held here, resumed here, received by another instance, or computed again there.

See docs/protocol.md.

A *hop* is one stay of a request at an instance. Here are its sides in the scheduler of a stateless instance and in
the process that serves HTTP (``front``).
"""
