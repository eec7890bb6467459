"""The bench ``chaos``: faults and the verdict on who failed because of them, probes of aborts."""
