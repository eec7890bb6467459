"""What an instance tells a router about its load: pushed over ZMQ, one message after each change.

``message`` is the wire format, ``push`` the sender, ``pull`` the receiver, ``book`` brings a report and what was
dispatched since together in the ``InstanceView`` that policies read, ``window`` the averages that reports carry. An
instance pushes only where its operator gave an address (``--pla-telemetry``).
"""
