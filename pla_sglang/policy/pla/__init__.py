"""PLA-Serve across instances: spatial disaggregation, its pressure controller, and the bucket grid of its graphs."""
