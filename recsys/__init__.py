"""Training systems on the tiers: the embedding cache and the replay buffer come here; nothing is built yet."""

__all__: list[str] = []
