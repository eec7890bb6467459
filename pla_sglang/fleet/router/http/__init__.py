"""HTTP/1.1 as the router speaks it: strict heads, message framing, answers of its own. No sockets here."""
