"""Output layers of language models at their real sizes."""
