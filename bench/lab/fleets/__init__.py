"""Whole fleets in the simulator: which policy, which forecast, at what cost; see bench/lab/docs/fleets.md."""
