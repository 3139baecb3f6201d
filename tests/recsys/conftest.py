"""What the tests of several trainers share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed as dist


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
