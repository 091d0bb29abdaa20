"""The tables of notebook 00: each returns what `Study.table` takes (what is shown, name, caption, all numbers)."""

from __future__ import annotations

import pandas as pd

from dpngd.config import METHODS
from dpngd.params import published
from dpngd.profiles import Profile
from dpngd.theory import Theory

Table = tuple[pd.DataFrame, str, str, pd.DataFrame]


def privacy(theory: Theory) -> Table:
    """sigma for every cell and method, and what it spends."""
    data = pd.DataFrame(theory.budget)
    shown = pd.DataFrame({
        "method": data["method"].map(lambda m: METHODS[m].label), "data": data["data"],
        "ε": data["epsilon"].map("{:g}".format), "δ": data["delta"].map("{:g}".format),
        "q = B/N": data["q"].map("{:.4f}".format), "T": data["T"], "σ": data["sigma"].map("{:.3f}".format),
        "spent, PRV": data["spent"].map("{:.3f}".format), "spent, RDP": data["spent_rdp"].map("{:.3f}".format)})
    return shown, "privacy", "Noise multiplier of every cell: the same for all methods", data


def cost() -> Table:
    """The paper's Table 1."""
    table = published()["privacy_table"]
    data = pd.DataFrame(table["rows"], columns=table["header"])
    return data, "privacy_cost", f"What the paper says is equal and what is not ({table['place']})", data


def schedule_of(profile: Profile) -> dict[str, float]:
    """The clamping schedule of the first cell of the profile's Table 2."""
    config = next(c for c in profile.configs("utility_table", methods=["dp-ngd"]))
    return {"lambda_safe": config.lambda_safe, "lambda_base": config.lambda_base, "T": config.T, "T1": config.T1,
            "p": config.p}
