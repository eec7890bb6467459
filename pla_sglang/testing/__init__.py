"""Helpers to run real servers, for tests and benches. No test framework is imported here."""
