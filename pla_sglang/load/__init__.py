"""The load of instances and the prompt prefixes in their caches.

``report`` is the wire format of an instance's load report, ``sockets`` its sender and receiver, ``window`` the averages
in reports. ``instance_load`` adds up the reports of an instance's ranks; ``tracker`` combines them with
later dispatches in the ``InstanceView`` that policies read. ``prefix_index`` estimates the prefix caches. An
instance pushes reports only if its operator gave an address (``--pla-telemetry``) or its server has pools.
"""
