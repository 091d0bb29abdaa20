"""Lower bounds of epsilon from scores: jax-privacy's estimators where they are installed, our own otherwise.

    pip install '.[audit]'          jax-privacy 2.0.0, some 600 MB with jax

    function         with the extra                                  without
    from_scores      epsilon_clopper_pearson, threshold by a split   `statistics.epsilon_lower`
    from_one_run     epsilon_one_run, the highest third guessed in   `statistics.one_run_epsilon`: the highest quarter
                                                                     guessed in, the lowest quarter out

Both are valid at level alpha. Tests compare our own with numbers of jax-privacy. Its `epsilon_from_gdp` of 2.0.0 is not
used: it flags clean code.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from dpngd.audit import statistics as st

Array = np.ndarray


def jax_privacy() -> Any:
    """jax-privacy's auditing module, or None where the extra is not installed."""
    try:
        return importlib.import_module("jax_privacy.auditing")
    except ModuleNotFoundError:
        return None


def from_scores(inside: Array, outside: Array, delta: float, alpha: float) -> tuple[float, str]:
    """A lower limit of epsilon from the scores of releases with a canary and without it, and how it was found."""
    theirs = jax_privacy()
    if theirs is None:
        return st.epsilon_lower(inside, outside, delta, alpha), "Clopper-Pearson"
    auditor = theirs.CanaryScoreAuditor(inside, outside)
    found = auditor.epsilon_clopper_pearson(alpha, delta, threshold_strategy=theirs.Split(seed=0))
    return float(found), "Clopper-Pearson, jax-privacy"


def from_one_run(scores: Array, coins: Array, delta: float, alpha: float) -> tuple[float, str]:
    """A lower limit of epsilon from one run: scores (m,) of samples, each in the set by a fair coin (m,) bool."""
    m, theirs, order = len(scores), jax_privacy(), np.argsort(scores)
    if theirs is None:
        each = m // 4
        right = int(coins[order[-each:]].sum()) + int((~coins[order[:each]]).sum())
        return st.one_run_epsilon(m, 2 * each, right, delta, alpha), f"{right} of {2 * each} guesses right"
    threshold = scores[order[-(m // 3)]]  # by rank: it does not look at the coins
    auditor = theirs.CanaryScoreAuditor(scores[coins], scores[~coins])
    found = auditor.epsilon_one_run(alpha, delta, threshold_strategy=theirs.Explicit(float(threshold)))
    right = int((coins & (scores >= threshold)).sum())
    return float(found), f"{right} of {int((scores >= threshold).sum())} guesses right, jax-privacy"
