"""The audit of distributed noise: clean code passes, and both faults are found."""

import pytest

from dpngd.audit import distributed


@pytest.mark.parametrize("method", ["dp-ngd", "gep"])
def test_the_product_passes(method):
    lines = distributed.check(method, releases=60)
    assert [line.line() for line in lines if not line.passed] == []
    assert [line.test for line in lines] == ["distributed sum", "distributed noise, 0", "distributed noise, 1",
                                             "distributed noise, 2", "distributed release"]


@pytest.mark.parametrize(("fault", "failing"), [
    ("each", {"distributed noise, 0", "distributed noise, 1", "distributed noise, 2"}),
    ("first", {"distributed noise, 1", "distributed noise, 2", "distributed release"})])
def test_a_planted_fault_is_found(fault, failing):
    lines = distributed.check("dp-sgd", releases=20, fault=fault)
    assert {line.test for line in lines if not line.passed} == failing
    if fault == "each":
        assert all(f"{3**0.5:.1f}" in line.measured for line in lines if not line.passed), "sigma C sqrt(3)"
