"""Adapters to the frameworks of continual learning."""
