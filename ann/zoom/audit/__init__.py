"""Recall watched in use: an exact check of some searches, and tuning where they find too little."""
