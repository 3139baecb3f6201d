"""Plans for a known future: lookahead, simulation, miss-ratio curves and costs."""
