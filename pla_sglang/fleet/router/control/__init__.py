"""The control plane of the router: decides where requests go, and knows what became of each.

Pure parts (time and randomness come in, decisions and states come out): ``request_record``, ``ledger``, ``prompts``,
``relay_messages``; of ``workers``: ``table``, ``health``, ``breaker``, ``discovery``; of ``observability``:
``explain``, ``spans``. Effects: ``workers.instance_client`` and ``workers.monitor`` (HTTP and ZMQ to instances),
``state_file`` and ``observability.recorder`` (files), ``observability.tracing`` (spans to a collector),
``relay_ports`` (messages to relays). ``request_dispatcher`` joins the parts for the life of a request,
``control_plane`` for that of the process.
"""
