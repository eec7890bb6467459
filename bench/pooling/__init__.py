"""Parts of ``bench.spatial``: workload, arms, measuring, figures, picture."""
