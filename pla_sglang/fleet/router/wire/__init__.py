"""Messages between relays and the control plane, and how they travel."""
