"""The bench ``alerts``: what provokes each rule of the shipped alerts, and whether it fires and clears."""
