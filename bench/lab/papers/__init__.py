"""The figures and tables of the four papers, run again on our policies and simulator; see bench/lab/docs/papers.md."""
