"""The bench ``router_cost``: what routers cost in front of mock instances, and a client cheaper than any of them."""
