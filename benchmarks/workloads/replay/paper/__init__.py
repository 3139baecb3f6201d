"""Carousel Memory's own experiment: a grid of cells, each a method with one memory, one way of swaps and one seed."""
