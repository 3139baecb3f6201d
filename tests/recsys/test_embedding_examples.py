"""The examples in the docstrings of the embedding tables."""

import doctest
import importlib
import pkgutil

import pytest

from memhier.recsys import embedding

NAMES = sorted(module.name for module in pkgutil.walk_packages(embedding.__path__, "memhier.recsys.embedding."))


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
