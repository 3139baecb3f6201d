"""One Ray cluster of this machine for all tests of this folder."""

import pytest


@pytest.fixture(scope="session")
def ray():
    """Start Ray, and stop it at the end."""
    pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    yield ray
    ray.shutdown()
