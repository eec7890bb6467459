"""Streams of stateless instances that die, drain or are told to end."""
