"""What the four systems are compared with: plain dispatchers, engine orders, load migration, autoscalers."""
