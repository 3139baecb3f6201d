"""Reading ahead: batches known before their step."""
