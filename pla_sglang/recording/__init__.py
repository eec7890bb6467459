"""A record of a policy's inputs and decisions, as JSON lines: written by the router, replayed by the simulator.

``rows`` is the format, ``views`` writes and restores ``InstanceView`` objects by difference, ``file`` reads and writes.
"""
