"""The processes of a router: supervisor, relays, control plane."""
