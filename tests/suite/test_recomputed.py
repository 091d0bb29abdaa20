"""Six words computed a second time, in plain numpy, from the lines of a results file: nothing of dpngd.suite's rules,
statistics or tables is used for it. Once on made-up records, and on results/cpu.jsonl where a claim has been run.

Only which runs an artifact asks for (their keys) is taken from the profile.
"""

import base64
import itertools
import json
import math

import numpy as np
import pytest
from claim_runs import BY_ID, CELLS, CURVES, FACE, MAIN, one_by_one, product, wobble
from scipy import stats as scipy_stats
from suite_records import record

from dpngd.suite import claims, params, paths, profiles
from dpngd.suite.runs import Runs

SIX = ("best-everywhere", "stricter-larger", "clipping-space", "few-images", "no-floor", "fewer-steps")
BASELINES = ("dp-sgd", "dp-sgd-pt", "gep", "adadps")


# ---- From a line to numbers ------------------------------------------------------------------------------------------

def lost(r):
    return r["status"] != "ok" or r["accuracy"] is None


def accuracy(r):
    return 100 / r["data"]["private"]["classes"] if lost(r) else 100 * r["accuracy"]


def images(r, m):
    if lost(r):
        return np.full(m, accuracy(r))
    raw = np.frombuffer(base64.b64decode(r["correct"]["bits"]), np.uint8)
    return 100.0 * np.unpackbits(raw)[:m]


def pick(records, **fields):
    """Seed -> record, of those with these values in their config."""
    found = {}
    for r in records:
        if all(r["config"].get(k) == v for k, v in fields.items()):
            assert r["config"]["seed"] not in found
            found[r["config"]["seed"]] = r
    return found


def contrast(terms):
    """(L_s, variance that images add, number of images, whether a run scores chance)."""
    seeds = sorted(set.intersection(*(set(rs) for _, rs in terms)))
    L_s = np.array([sum(c * accuracy(rs[s]) for c, rs in terms) for s in seeds])
    used = [rs[s] for _, rs in terms for s in seeds]
    sizes = {r["correct"]["n"] if "correct" in r else None for r in used if not lost(r)}
    if len(sizes) != 1 or None in sizes:
        return L_s, 0.0, 0, any(map(lost, used))
    (m,) = sizes
    L = np.array([sum(c * images(rs[s], m) for c, rs in terms) for s in seeds])
    n = len(seeds)
    interaction = L - L.mean(0) - L.mean(1)[:, None] + L.mean()
    extra = np.var(L.mean(0), ddof=1) / m - np.sum(interaction**2) / ((n - 1) * (m - 1)) / (n * m)
    return L_s, max(0.0, extra), m, any(map(lost, used))


def student(L_s, extra, m, s2=None, df_s=None):
    """(mean, standard error, degrees of freedom)."""
    n = len(L_s)
    v = (np.var(L_s, ddof=1) if s2 is None else s2) / n
    df = (v + extra) ** 2 / (v**2 / (n - 1 if df_s is None else df_s) + extra**2 / max(1, m - 1))
    return L_s.mean(), math.sqrt(v + extra), df


def limits(mean, se, df, level=0.95):
    return scipy_stats.t.interval(level, df, mean, se)


def pooled(contrasts):
    """student() of each, with the variance of those that have no lost run, where it is not too small for one."""
    clean = [L_s for L_s, _, _, bad in contrasts if not bad]
    if len(clean) < 2:
        return [student(*c[:3]) for c in contrasts]
    n, m = len(clean[0]), len(clean)
    s2 = np.mean([np.var(x, ddof=1) for x in clean])
    r2 = np.mean([np.corrcoef(a, b)[0, 1] ** 2 for a, b in itertools.combinations(clean, 2)])
    df = m * (n - 1) / (1 + (m - 1) * r2)
    return [student(*c[:3]) if c[3] or np.var(c[0], ddof=1) > scipy_stats.f.ppf(0.75, n - 1, df) * s2
            else student(*c[:3], s2, df) for c in contrasts]


def first_holm(p):
    """Whether Holm rejects anything at 2.5 %: his first step is Bonferroni's."""
    return min(p) * len(p) <= 0.025


def above_zero(found):
    """The word of "all of these are above 0"."""
    intervals = [limits(*f) for f in found]
    if all(low > 0 for low, _ in intervals):
        return "reproduced"
    if first_holm([scipy_stats.t.cdf(mean / se, df) for mean, se, df in found]):
        return "refuted"
    inner = [limits(*f, level=0.9) for f in found]
    return "equivalent" if all(low > -1 and high < 1 for low, high in inner) else "inconclusive"


# ---- The six ---------------------------------------------------------------------------------------------------------

def cells(records):
    return sorted({(r["config"]["data"], r["config"]["epsilon"]) for r in records})


def best_everywhere(records):
    found = []
    for data, m in itertools.product(sorted({d for d, _ in cells(records)}), BASELINES):
        found += pooled([contrast([(1, pick(records, method="dp-ngd", data=d, epsilon=e)),
                                   (-1, pick(records, method=m, data=d, epsilon=e))])
                         for d, e in cells(records) if d == data])
    return above_zero(found), found


def stricter_larger(records):
    found = []
    for data, m in itertools.product(sorted({d for d, _ in cells(records)}), BASELINES):
        epsilons = [e for d, e in cells(records) if d == data]
        x = np.log(epsilons)
        x = (x - x.mean()) / np.sum((x - x.mean()) ** 2) * (x[-1] - x[0])
        terms = []
        for w, e in zip(x, epsilons, strict=True):
            terms += [(-w, pick(records, method="dp-ngd", data=data, epsilon=e)),
                      (w, pick(records, method=m, data=data, epsilon=e))]
        found.append(student(*contrast(terms)[:3]))
    return above_zero(found), found


def clipping_space(records):
    found = []
    for a, b in (("dp-ngd", "dp-ngd-post"), ("dp-ngd-post", "dp-ngd-pre")):
        found += pooled([contrast([(1, pick(records, method=a, epsilon=e)), (-1, pick(records, method=b, epsilon=e))])
                         for _, e in cells(records)])
    return above_zero(found), found


def few_images(records):
    sizes = sorted({r["config"]["public_size"] for r in records if r["config"]["method"] == "dp-ngd"} - {500})
    found = [student(*contrast([(1, pick(records, method="dp-ngd", public_size=n)),
                                (-1, pick(records, method="dp-ngd", public_size=500))])[:3]) for n in sizes]
    inner = [limits(*f, level=0.9) for f in found]
    if all(low > -1 and high < 1 for low, high in inner):
        return "reproduced", found
    outside = [min(scipy_stats.t.sf((mean - 1) / se, df), scipy_stats.t.cdf((mean + 1) / se, df))
               for mean, se, df in found]
    return "refuted" if first_holm(outside) else "inconclusive", found


def no_floor(records):
    ends = []
    for r in records:
        if r["config"]["method"] == "dp-ngd-no-floor":
            losses = [x for x in r["train_loss"] if x is not None]
            ends.append(r["status"] == "diverged" or not losses or losses[-1] > losses[0])
    low, high = scipy_stats.binomtest(sum(ends), len(ends)).proportion_ci(0.95, "exact")
    return "reproduced" if low > 0.5 else "refuted" if high < 0.5 else "inconclusive", (np.mean(ends), low, high)


def fewer_steps(records):
    words, found, down, whole = [], [], [], True
    for data, epsilon in cells(records):
        factor = {"cifar10": 2.3, "svhn": 10.0}[data]
        here = [r for r in records if (r["config"]["data"], r["config"]["epsilon"]) == (data, epsilon)]
        T = np.array(sorted({r["config"]["T"] for r in here}))
        seeds = sorted({r["config"]["seed"] for r in here})
        table = np.array([[[accuracy(pick(here, method=m, T=int(t))[s]) for s in seeds] for t in T]
                          for m in ("dp-sgd-pt", "adadps", "dp-ngd")])  # those of the paper's figure

        def ratio(chosen, T=T, table=table):
            mean = table[:, :, chosen].mean(2)
            top = mean[:-1].max()
            at = T[np.where(mean[:-1] == top)[1].min()]
            ours = np.maximum.accumulate(mean[-1])
            if ours[-1] < top:
                return at, 0.0, 0.0
            j = np.where(ours >= top)[0][0]
            there = T[0] if j == 0 else np.exp(np.interp(top, ours[j - 1:j + 1], np.log(T[j - 1:j + 1])))
            return at, at / there, np.inf if j == 0 else at / there  # at the smallest budget already: a lower bound

        peak, point, _ = ratio(np.arange(len(seeds)))
        if peak in (T[0], T[-1]):
            whole = False
            continue
        n = len(seeds)
        draws = np.random.default_rng(0).integers(n, size=(10_000, n))
        tail = scipy_stats.norm.cdf(math.sqrt(n / (n - 1)) * scipy_stats.t.ppf(0.025, n - 1))
        values = np.sort([ratio(d)[1] for d in draws])
        low, high = (values[math.ceil(q * 10_000) - 1] for q in (tail, 1 - tail))
        found.append((point, low, high))
        words.append("reproduced" if low >= factor else "not")
        share = np.mean([ratio(d)[2] >= factor for d in draws])
        down.append(scipy_stats.t.cdf(scipy_stats.norm.ppf(share) * math.sqrt((n - 1) / n), n - 1))
    if not words:
        return "not testable here", found
    if whole and set(words) == {"reproduced"}:
        return "reproduced", found
    return "refuted" if first_holm(down) else "inconclusive", found


RECOMPUTE = dict(zip(SIX, (best_everywhere, stricter_larger, clipping_space, few_images, no_floor, fewer_steps),
                     strict=True))


def compare(claim, configs, lines):
    """Our word, and the estimate with its limits, are the suite's."""
    keys = [c.key() for c in configs]
    by_key = {r["key"]: r for r in map(json.loads, lines)}
    row = claims.decide(BY_ID[claim], {BY_ID[claim].source: Runs.of(configs, [by_key.get(k) for k in keys])})
    if row["word"] == "not run":
        pytest.skip(f"{claim} is not run: {row['runs']} of {row['planned']} runs are in the file")
    needed = BY_ID[claim].methods
    records = [by_key[k] for k in dict.fromkeys(keys) if not needed or by_key[k]["config"]["method"] in needed]
    word, found = RECOMPUTE[claim](records)
    assert word == row["word"]
    ours = [tuple(found)] if claim == "no-floor" else found if claim == "fewer-steps" else \
        [(f[0], *limits(*f)) for f in found]
    theirs = [(p["estimate"], p["low"], p["high"]) for p in row["parts"] if p["estimate"] is not None]
    assert np.allclose(sorted(ours), sorted(theirs), rtol=1e-6, atol=1e-9)
    assert any(np.allclose(o, (row["estimate"], row["low"], row["high"])) for o in ours) or word == "not testable here"
    return word


# ---- On made-up records, and on those that are shipped ---------------------------------------------------------------

ARTIFACTS = {
    "utility_table": product(MAIN, [(d, e) for d in ("cifar10", "svhn") for e in (1.0, 2.0, 8.0)]),
    "ablation_clipping": product(("dp-ngd", "dp-ngd-post", "dp-ngd-pre"), CELLS),
    "sample_efficiency": product(("adadps", "dp-ngd"), FACE, one_by_one(public_size=(50, 500, 5000))),
    "ablation_floor": product(("dp-ngd", "dp-ngd-fixed-floor", "dp-ngd-no-floor"), FACE, seeds=range(10)),
    "convergence": product(MAIN, CURVES, one_by_one(T=(25, 50, 100, 200, 400))),
}


def made_up(config, lead, noise, diverging):
    """A line of a results file: 2,000 images, right by chance; some runs diverge."""
    rng = np.random.default_rng(abs(hash((config.seed, config.T, config.epsilon, round(wobble(config) * 1e9)))) % 2**32)
    easy = np.random.default_rng(0).normal(0.5, 0.2, 2000)
    rank = {"dp-ngd": 1.0, "dp-ngd-post": 0.5}.get(config.method, 0.0) * (1.5 - 0.5 * math.log(config.epsilon))
    chance = easy + 0.06 * math.log(config.epsilon) - 0.03 * abs(math.log(config.T / 200)) + lead * rank
    chance += 0.4 * lead * (config.public_size == 50) + noise * wobble(config) / 10
    r = record(config, None, correct=rng.random(2000) < np.clip(chance, 0, 1),
               losses=[2.0, 5.0 if config.method == "dp-ngd-no-floor" and rng.random() < 0.5 + 3 * lead else 1.0])
    if rng.random() < diverging:
        r |= {"status": "diverged", "accuracy": None}
        del r["correct"]
    return json.dumps(r)


WAYS = [(0.2, 0.05, 0.0), (-0.2, 0.05, 0.0), (0.03, 1.0, 0.0), (0.2, 0.05, 0.03), (0.0, 0.05, 0.0)]


@pytest.mark.parametrize("claim", SIX)
def test_the_same_word_on_made_up_records(claim):
    configs = ARTIFACTS[BY_ID[claim].source]
    words = {compare(claim, configs, [made_up(c, *way) for c in configs]) for way in WAYS}
    assert len(words) >= 2, "the ways differ in what they show"


@pytest.mark.parametrize("claim", SIX)
def test_the_same_word_on_the_shipped_results(claim):
    path = paths.ROOT / "results" / "cpu.jsonl"
    if not path.exists():
        pytest.skip("results/cpu.jsonl is not there yet")
    profile = profiles.load("cpu")
    compare(claim, profile.configs(BY_ID[claim].source), path.read_text(encoding="utf-8").splitlines())


def test_the_factors_are_those_of_the_paper():
    rows = params.published()["convergence"]["text"]
    assert {r["data"]: r["value"] for r in rows if r["name"] == "fewer steps"} == {"cifar10": 2.3, "svhn": 10.0}
