"""Benches whose result is right or wrong."""
