"""Every planted leak is found, and its clean control is not flagged."""

import pytest

from dpngd.audit import leaks
from dpngd.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns about itself in many places


@pytest.mark.parametrize("name", [leak.name for leak in leaks.leaks()])
def test_a_planted_leak_is_found_and_its_control_passes(name):
    outcome = leaks.try_leak(leaks.find(name))
    assert outcome.found, f"missed: {outcome.check} saw nothing"
    assert outcome.control, f"the clean control was flagged by {outcome.control_by}"
    assert outcome.by.startswith((outcome.check, "refused")) or "refused" in outcome.by
    assert outcome.power


def test_an_unknown_leak_is_an_error():
    with pytest.raises(UsageError, match="no planted leak"):
        leaks.find("none")
