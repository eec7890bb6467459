"""What the benchmarks share: workloads, the client, server arms, statistics, reports."""
