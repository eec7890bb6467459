"""Arrow (arXiv 2505.11916): stateless instances, four elastic pools, SLO-aware request and instance scheduling."""
