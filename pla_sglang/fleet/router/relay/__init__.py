"""One relay: client connections, requests, upstream connections."""
