"""All policies together: one instance for both phases where that serves best, roles where targets are tight."""
