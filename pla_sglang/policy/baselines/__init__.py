"""Baselines of the four systems: plain dispatchers, engine orders, load migration, autoscalers."""
