"""Workloads with a name: each module is one program that measures one promise and prints the machine beside it."""

__all__: list[str] = []
