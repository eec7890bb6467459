"""How KV travels between instances: peers and connections, rooms, the sending and the receiving end.

Pages stay allocated until no transfer touches them (``deferred_free``).
"""
