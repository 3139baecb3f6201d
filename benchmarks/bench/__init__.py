"""``memhier bench``: named workloads, run beside their rivals, and their results."""

__all__: list[str] = []
