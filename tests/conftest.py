"""What all tests share: one thread, and property tests that draw the same examples on every machine."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from dpngd.noise import stream

torch.set_num_threads(1)
settings.register_profile("dpngd", deadline=None, derandomize=True, database=None, max_examples=25,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("dpngd")


@pytest.fixture
def rng(request):
    """A generator of the test's own, seeded by its name."""
    return stream(0, request.node.name)
