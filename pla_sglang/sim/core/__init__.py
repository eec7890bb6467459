"""Discrete-event simulator of a serving fleet. Holds no policy: it supplies snapshots, virtual time and costs."""
