"""Gradients by worker threads: the same as by one, in order, on the parameters of the moment."""

import os
import threading

import pytest
import torch
from torch import nn

from dpngd.errors import UsageError
from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample, micro_batch_size, pieces, views_at_once
from dpngd.mechanism import GaussianMechanism
from dpngd.training import models
from dpngd.training.parallel import Workers, replica, shares_of_cores, worker_threads


def data(n=40, K=1):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n * K, 3, 16, 16, generator=g), torch.randint(10, (n,), generator=g)


def network():
    return models.build("resnet-8", classes=10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("K", [1, 4])
def test_same_as_one_thread_bit_for_bit_and_in_order(K):
    x, y = data(K=K)
    model = network()
    results = []
    for threads in (1, 3):
        per_sample = PerSample(model, K=K)
        grads = list(Workers(per_sample, threads).gradients(pieces(x, y, K, views=8 * K)))
        assert [len(g) for g in grads] == [8] * 5
        results.append(grads)
    for one, many in zip(*results, strict=True):
        assert torch.equal(one.materialise(), many.materialise())
        assert torch.equal(one.losses, many.losses)


def test_workers_clip_and_sum_what_one_thread_would_bit_for_bit():
    """The mechanism's share of a micro-batch is computed by the worker that has its gradients, once each."""
    x, y = data()
    model, where = network(), []

    class Mechanism(GaussianMechanism):
        def share(self, g, geometry):
            where.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
            return super().share(g, geometry)

    sums = []
    for threads in (1, 2):
        per_sample = PerSample(model)
        workers = Workers(per_sample, threads)
        for _ in range(2):  # the first micro-batch of all is checked, in the main thread
            where.clear()
            found = Mechanism((0.5,), 1.0, 40).clipped_sums(pieces(x, y, 1, views=8), Euclidean(), per_sample.zeros(),
                                                            workers.map)
            assert found.seen == 40
            sums.append(found)
        if threads > 1:
            assert where == [(False, 1)] * 5
    one, *others = sums
    plain = GaussianMechanism((0.5,), 1.0, 40).clipped_sums(
        [per_sample(*part) for part in pieces(x, y, 1, views=8)], Euclidean(), per_sample.zeros())
    for other in (*others, plain):
        assert all(torch.equal(a, b) for a, b in zip(one.sums[0], other.sums[0], strict=True))
        assert torch.equal(one.norms, other.norms)
        assert torch.equal(one.losses, other.losses)


def test_a_step_is_on_one_thread_where_workers_have_the_others(monkeypatch):
    """A guard against slowness: a second thread of OpenMP would spin on a core that the next step's workers need."""
    calls = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    with Workers(PerSample(network()), 2).alone():
        assert calls[-1] == 1
    assert calls[-1] == 2
    calls.clear()
    with Workers(PerSample(network()), 1).alone():
        assert calls == []


def test_replicas_follow_the_model():
    x, y = data(16)
    model = network()
    workers = Workers(PerSample(model), 2)
    before = torch.cat([g.materialise() for g in workers.gradients(pieces(x, y, 1, views=4))])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    after = torch.cat([g.materialise() for g in workers.gradients(pieces(x, y, 1, views=4))])
    expected = torch.cat([g.materialise() for g in Workers(PerSample(model), 1).gradients(pieces(x, y, 1, views=4))])
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


def test_a_replica_shares_memory_but_not_modules():
    model = network()
    twin = replica(model)
    assert all(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}


def test_an_error_in_a_worker_reaches_the_caller_and_threads_are_restored():
    x, y = data(16)
    before = torch.get_num_threads()
    workers = Workers(PerSample(network()), 2)
    list(workers.gradients(pieces(x, y, 1, views=4)))
    with pytest.raises(RuntimeError):
        list(workers.gradients([(x[:4], y[:4]), (x[:4, :2], y[:4])]))  # two channels for a network of three
    assert torch.get_num_threads() == before
    assert len(list(workers.gradients(pieces(x, y, 1, views=4)))) == 4  # and the workers go on


def test_the_model_is_checked_before_any_worker_sees_it():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3 * 16 * 16, 10)

        def forward(self, x):
            return self.fc(x.flatten(1)) + x.mean()

    x, y = data(8)
    with pytest.raises(UsageError, match="mixes samples"):
        list(Workers(PerSample(Mixing()), 2).gradients(pieces(x, y, 1, views=2)))


@pytest.mark.parametrize(("samples", "views", "K", "threads", "size"), [
    (1024, 64, 1, 2, 64), (64, 64, 1, 2, 32), (1024, 64, 16, 2, 4), (3, 64, 1, 2, 2), (1, 64, 16, 4, 1),
    (5, 4, 16, 1, 1), (520, 256, 1, 1, 260), (700, 256, 1, 1, 234)])
def test_small_batches_are_shared_out(samples, views, K, threads, size):
    assert micro_batch_size(K, views, samples=samples, threads=threads) == size


def test_light_networks_take_larger_micro_batches():
    """By the outputs of the trained layers: 14,346 numbers per image of the small network, 8 times as many of WRN."""
    assert views_at_once(models.build("small", classes=10), (3, 32, 32)) == 256
    assert views_at_once(models.build("wrn-10-1", classes=10), (3, 32, 32)) == 128


@pytest.mark.parametrize(("name", "threads", "views"), [
    ("small", 2, 128), ("small", 3, 85), ("small", 8, 64), ("wrn-10-1", 2, 64), ("wrn-10-1", 8, 64),
    ("wrn-16-4", 1, 28), ("wrn-16-4", 2, 28)])
def test_threads_share_what_is_in_memory_at_once(name, threads, views):
    assert views_at_once(models.build(name, classes=10), (3, 32, 32), threads) == views


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are chosen on Linux only")
def test_each_worker_has_cores_of_its_own(monkeypatch):
    """A guard against slowness: Linux put two workers on one core while the other had nothing to do."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    together, pool = threading.Barrier(2), worker_threads(2, -1)

    def where():
        together.wait(10)
        return os.sched_getaffinity(0), torch.get_num_threads()

    (one, a), (two, b) = [f.result() for f in [pool.submit(where) for _ in range(2)]]
    assert (a, b) == (1, 1)
    assert not one & two
    assert one | two == cores
    assert os.sched_getaffinity(0) == cores  # those of the calling thread stay
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {3, 5, 6, 9})
    assert shares_of_cores(2) == [{3, 6}, {5, 9}]
    assert shares_of_cores(5) == []  # more workers than cores: the system shares them out


def test_runs_in_one_process_share_its_workers():
    assert Workers(PerSample(network()), 2)._pool is Workers(PerSample(network()), 2)._pool
