"""What the workloads of the group ``decode`` share: trained layers with real contexts, peers, and the clock."""

__all__: list[str] = []
