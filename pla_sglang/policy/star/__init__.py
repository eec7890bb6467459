"""STAR (HPDC '26): decode rescheduling by predicted remaining length."""
