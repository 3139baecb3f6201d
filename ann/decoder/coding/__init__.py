"""The output layer, and its projection, codes and graph."""
