"""The accounting against dp-accounting's privacy loss distributions, which share no code with ours or Opacus's.

Its pessimistic estimate (connect the dots) is within a few tenths of a percent of the truth at these meshes; its
optimistic one rounds losses down, which costs up to T h and is too much at T = 10^6. So we must also not be more than
1% below the pessimistic one, which is the stricter of the two: the optimistic one may be coarse.

Every (epsilon, delta, q, T) that occurs in a run of a profile is checked once, and for private curvature also its share
and T_cur: some 100 settings, which the profiles name themselves, at 0.3 s each.
"""

import pytest
from dp_accounting.pld import privacy_loss_distribution

from dpngd import methods, privacy
from dpngd.methods import spends_of
from dpngd.suite import params, profiles


def theirs(parts, q, delta, epsilon, pessimistic):
    T = sum(n for _, n in parts)
    small = min(sigma for sigma, _ in parts) < 0.5  # the loss is wide, and a fine mesh slow
    h = 0.02 * epsilon / T**0.5 if pessimistic else max(0.05 * epsilon / T, epsilon / 5000 if small else 2e-5)
    whole = None
    for sigma, n in parts:
        loss = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, pessimistic_estimate=pessimistic, value_discretization_interval=h, sampling_prob=q,
            use_connect_dots=pessimistic).self_compose(n)
        whole = loss if whole is None else whole.compose(loss)
    try:
        return whole.get_epsilon_for_delta(delta)
    except OverflowError:  # rounded down 10^6 times, losses are so negative that their exponential overflows
        assert not pessimistic
        return 0.0


def check(parts, q, delta):
    ours = privacy._bound(parts, q, delta, "prv")
    upper = theirs(parts, q, delta, ours, True)
    assert max(theirs(parts, q, delta, ours, False), 0.99 * upper) <= ours <= 1.02 * upper
    return ours


def settings():
    """(epsilon, delta, q, T) of every run of every profile, each once, private curvature with its two kinds."""
    found = {}
    for name in params.profile_names():
        for c in profiles.load(name).all_configs():
            N = c.N - round(c.N * c.validation)
            private = (c.method, c.T_cur) if methods.method(c.method).curvature_share else ()
            found.setdefault((c.epsilon, c.delta, c.B / N, c.T, *private), (c, N))
    return [found[key] for key in sorted(found, key=str)]


SETTINGS = settings()


def test_every_run_of_every_profile_has_its_setting_among_them():
    checked = {(c.epsilon, c.delta, c.B / N, c.T, methods.method(c.method).curvature_share, c.T_cur)
               for c, N in SETTINGS}
    plain = {row[:4] for row in checked if not row[4]}
    assert set(params.profile_names()) >= {"quick", "cpu", "paper"}
    for name in params.profile_names():
        for c in profiles.load(name).all_configs():
            share = methods.method(c.method).curvature_share
            row = (c.epsilon, c.delta, c.B / (c.N - round(c.N * c.validation)), c.T)
            assert (*row, share, c.T_cur) in checked if share else row in plain


@pytest.mark.parametrize(("config", "N"), SETTINGS, ids=[f"{c.method}-{c.epsilon:g}-{c.T}-{N}" for c, N in SETTINGS])
def test_the_settings_of_the_profiles(config, N):
    q = config.B / N
    parts = tuple((s.sigma, s.releases(config.T)) for s in spends_of(config, q, N))
    assert config.epsilon - 1e-3 <= check(parts, q, config.delta) <= config.epsilon


@pytest.mark.parametrize(("sigma", "q", "T", "delta"), [
    (0.31428, 1e-5, 1, 1e-6), (0.10403, 1e-5, 30, 1e-6), (0.12802, 1e-5, 1000, 1e-6), (0.2, 1e-5, 30_000, 1e-6),
    (0.34522, 1e-5, 10**6, 1e-6), (0.1737, 1e-5, 10**6, 1e-6), (0.8685, 1e-3, 1, 1e-6), (0.14813, 1e-3, 30, 1e-6),
    (0.7, 1e-3, 30_000, 1e-8), (2.0, 0.5, 3000, 1e-6), (300.0, 0.9, 1000, 1e-5), (40.0, 0.05, 10**6, 1e-5),
    (100.0, 1.0, 10_000, 1e-6), (8.0, 1.0, 10_000, 1e-9),
])  # fmt: skip
def test_the_wide_range(sigma, q, T, delta):
    """epsilon 0.05 to 200, q 1e-5 to 1, T 1 to 10^6."""
    assert 0.03 < check(((sigma, T),), q, delta) < 300
