"""The property bench of requests that move: ``python -m bench hops``."""
