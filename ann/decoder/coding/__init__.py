"""The layer's codes, projection and graph."""
