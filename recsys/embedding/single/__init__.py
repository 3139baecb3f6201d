"""Modules of one table: EmbeddingBag, and Embedding for rows that are not pooled."""
