"""A small translator, trained by the benchmark: sentence pairs, the model, its training, and beam search."""
