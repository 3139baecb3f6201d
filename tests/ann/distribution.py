"""The comparison of drawn words with their probabilities."""

import numpy as np


def check_distribution(drawn, shares):
    """Compare draws with probabilities by chi-square over pooled words, and by total variation."""
    count, words = len(drawn), len(shares)
    found = np.bincount(drawn, minlength=words)
    assert shares[drawn].min() > 0, "a word that the truncation takes out"
    order = np.argsort(-shares)
    pools = np.minimum(np.cumsum(shares[order]) * count // 8, count)  # of at least about eight draws
    expected = np.bincount(np.unique(pools, return_inverse=True)[1], weights=count * shares[order])
    seen = np.bincount(np.unique(pools, return_inverse=True)[1], weights=found[order])
    expected, seen = expected[expected > 0], seen[expected > 0]
    free = max(1, len(expected) - 1)
    chi = float(((seen - expected) ** 2 / expected).sum())
    normal = ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / np.sqrt(2 / (9 * free))  # Wilson and Hilferty
    assert normal < 5, f"chi-square {chi:.0f} of {free} degrees of freedom"
    noise = np.sqrt(2 * shares * (1 - shares) / (np.pi * count)).sum() / 2
    assert np.abs(found / count - shares).sum() / 2 < 1.15 * noise + 3 / np.sqrt(count)
