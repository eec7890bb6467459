"""The router: an HTTP front for SGLang instances that dispatches by policy.

    relays (N processes, one port)                         control (one process, one event loop)
    HTTP front, request bodies, upstream connections,      policies, worker table, health, ledger, telemetry,
    streams, time limits, aborts                           admission, explain, metrics text
                 │                                                     ▲
                 └── messages.py, over a socket or by plain calls ──────────┘

Who owns what:

- ``messages.py``: every message between the two, and nothing else of either side.
- ``protocols.py``: ``ControlPort`` (what a control plane offers) and ``RelayPort`` (what it may ask of a relay).
- ``control/``: the control plane. It never sees a client's connection and reads no answer.
- everything else: the data plane. It decides nothing: it asks before a request goes out, reports what happened, and
  does what it is told. All it keeps are its own open requests, so a control plane that restarts cuts no stream and
  learns from each relay's ``Hello`` what is open.

``--relay-workers 0`` runs both in one process: the same objects, joined by plain calls.
"""
