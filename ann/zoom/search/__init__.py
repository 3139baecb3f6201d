"""Search: plans of one call, reads, ranking and results."""
