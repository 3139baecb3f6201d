"""``memhier bench``: named workloads, run beside their rivals, and what came out."""

__all__: list[str] = []
