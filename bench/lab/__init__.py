"""The papers' figures, fleets of policies, frontiers and baselines."""
