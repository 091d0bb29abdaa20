"""`run_all.py --list`: what a profile would run, before anything is trained."""

from __future__ import annotations

from collections import defaultdict

from dpngd import privacy
from dpngd.config import METHODS, RunConfig
from dpngd.profiles import Profile
from dpngd.store import Store

Wanted = dict[str, dict[str, list[RunConfig]]]


def listing(profile: Profile, wanted: Wanted, store: Store) -> str:
    """Runs by notebook; then every kind of run with its noise, steps and expected hours."""
    runs = {c.key(): c for groups in wanted.values() for group in groups.values() for c in group}
    done = {key for key, c in runs.items() if store.get(c) is not None}
    lines = [f"profile {profile.name}: {profile.about}", "",
             f"{'notebook':32}{'artifact':22}{'runs':>6}{'stored':>8}{'hours':>10}"]
    counted: set[str] = set()
    for notebook, groups in wanted.items():
        for artifact, group in groups.items():
            keys = {c.key() for c in group}
            new = keys - counted
            counted |= keys
            hours = sum(profile.seconds(runs[k]) for k in new) / 3600
            shared = f"  ({len(keys) - len(new)} shared with rows above)" if len(new) < len(keys) else ""
            lines.append(f"{notebook:32}{artifact:22}{len(keys):6}{len(keys & done):8}{spell(hours):>10}{shared}")
        if not groups:
            lines.append(f"{notebook:32}{'(no training)':22}{0:6}{0:8}{0:10.2f}")
    lines += ["", f"{'method':22}{'data':10}{'model':11}{'eps':>5}{'T':>7}{'B':>6}{'q':>9}{'sigma':>9}{'runs':>6}"
                  f"{'hours':>10}"]
    kinds: dict[tuple, list[RunConfig]] = defaultdict(list)
    for c in runs.values():
        kinds[c.data, c.epsilon, c.T, c.method, c.model, c.B, c.validation].append(c)
    for (data, epsilon, T, method, model, B, _), group in sorted(kinds.items(), key=lambda kv: str(kv[0][:2]) + str(
            kv[0][2]).zfill(9)):
        hours = sum(map(profile.seconds, group)) / 3600
        q, sigma = noise(group[0])
        lines.append(f"{method:22}{data:10}{model:11}{epsilon:5g}{T:7}{B:6}{q:9.5f}{sigma:>9}{len(group):6}{spell(hours):>10}")
    total = sum(map(profile.seconds, runs.values())) / 3600
    left = sum(profile.seconds(c) for k, c in runs.items() if k not in done) / 3600
    steps = sum(c.T for c in runs.values())
    lines += ["", f"{len(runs)} runs, {steps:,} steps, {spell(total)} hours on {profile.settings['cost']['device']} "
                  f"(estimated); {len(done)} stored, {spell(left)} hours left"]
    return "\n".join(lines)


def spell(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def noise(config: RunConfig) -> tuple[float, str]:
    """q, and sigma of the gradients: of the run's whole budget, or of the part that private curvature leaves."""
    n = config.N - round(config.N * config.validation)
    budget = privacy.Budget(config.epsilon, config.delta)
    if "curvature_C" in METHODS[config.method].uses:
        budget = privacy.split(*budget, float(config.method.rsplit("-", 1)[1]) / 100)[1]
    q = config.B / n
    return q, f"{privacy.calibrate(*budget, q, config.T, N=n):.3f}"
