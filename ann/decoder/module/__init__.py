"""The decoder as a torch module and in text generation."""
