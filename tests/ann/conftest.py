"""What the tests of an index's life share."""

import pytest

from memhier.ann.zoom import layout, merge


@pytest.fixture
def small_sizes(monkeypatch):
    """Make spills, joins and chunks so small that they happen all the time."""
    monkeypatch.setattr(layout, "_FRESH_MOST", 3000)
    monkeypatch.setattr(layout, "_VECTORS_PER_LIST", 25)
    monkeypatch.setattr(merge, "_CHUNK_BYTES", 4000)
