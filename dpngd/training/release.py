"""Release mode: train with secret noise and secret batches, and write only what the guarantee covers.

    OUT/weights.safetensors   the averaged weights
    OUT/card.json             what they are, and what they cost: epsilon, delta, accountant, sampling, q, B, T, sigma
    OUT/README.md             the same for people

Guarantee: (epsilon, delta) for adding or removing one sample, of everything in OUT. Weights are post-processing of T
noisy sums (`dpngd.mechanism`) under Poisson sampling; both are drawn from the operating system's entropy and never
written down (`dpngd.noise`). The card is a function of the config, of N and of public data. Left out are losses, norms,
clip fractions, accuracies, the digest of the private set, and the seed, which decides the private subset where N is
given: all of them are functions of private data that nothing pays for.

Outside the guarantee: the choice of method and settings, if it was made by looking at runs on the same private data;
that the run came to its end; N itself, which q and B tell.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpngd
from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.methods import method
from dpngd.training.config import RunConfig

if TYPE_CHECKING:
    from dpngd.group import Group
    from dpngd.training.record import Record
    from dpngd.training.train import Progress

FORMAT = 1


def check_place(out: str | Path) -> None:
    """Before anything is computed: OUT is new, its parent is there, and weights can be written."""
    if not str(out):
        raise UsageError("the release has no name: name a new folder")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already: name a new folder for the release")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}: make it first")
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError("weights are written with safetensors, which is not installed: in a checkout, pip install "
                         "'.[train]'")


def release(config: RunConfig, out: str | Path, *, progress: Progress | None = None,
            group: Group | None = None) -> dict[str, Any]:
    """Train with secret noise and write weights and card into `out`; returns the card.

    Of a `group` of processes the first one writes.
    """
    from dpngd.group import ALONE
    from dpngd.training.train import train

    mark = Path(out) / ".unfinished"
    (group or ALONE).first(lambda: reserve(out, mark))  # before any budget is spent
    from safetensors.torch import save

    try:
        trained = train(config, noise="secret", progress=progress, **({"group": group} if group else {}))
        if trained.record.status != "ok":  # a function of the weights alone, which are what is released
            raise UsageError(f"the weights are not finite after step {trained.record.steps} of {config.T}: nothing was "
                             "written; lower eta (the budget is spent all the same)")
        card = card_of(config, trained.record)
        if group and group.rank:
            return card
    except BaseException:  # also an interrupt: nothing was written
        if not group or group.rank == 0:
            mark.unlink(missing_ok=True)
            mark.parent.rmdir()
        raise
    weights = {name: value.detach().cpu().contiguous() for name, value in trained.model.state_dict().items()}
    folder = Path(out)
    try:
        write_atomically(folder / "weights.safetensors", save(weights, metadata={"format": "pt"}))
        write_atomically(folder / "card.json", json.dumps(card, indent=1, allow_nan=False) + "\n")
        write_atomically(folder / "README.md", markdown(card))
        mark.unlink()
    except OSError as error:
        raise UsageError(f"{folder} could not be written ({error.strerror}): it is no release, delete it (the budget "
                         "is spent all the same)") from None
    return card


def reserve(out: str | Path, mark: Path) -> None:
    """Make OUT ours: it can be written to, and no other process releases into it."""
    check_place(out)
    try:
        Path(out).mkdir(exist_ok=True)
        mark.touch(exist_ok=False)
    except OSError as error:
        raise UsageError(f"{out} cannot be used for a release ({error.strerror}): name a new folder") from None


def card_of(config: RunConfig, record: Record) -> dict[str, Any]:
    """The model card. Every field is named here: what a record may hold one day does not get into a release."""
    p, private, public = record.privacy, record.data["private"], record.data["public"]
    if p["simulation"]:
        raise UsageError("the run is a simulation, whose noise its seed tells: release a run with noise='secret'")
    return {
        "format": FORMAT,
        "made_by": f"dpngd {dpngd.__version__}",
        "model": {"name": config.model, "classes": private["classes"], "parameters": record.parameters,
                  "input": "pixels of 0 to 255 as (x / 255 - 0.5) / 0.25", "weights": "exponential moving average"},
        "method": {"name": config.method, "label": method(config.method).label, "about": method(config.method).about},
        "private_data": {"name": private["name"]},
        "public_data": None if public is None else {"name": public["name"], "size": public["N"],
                                                    "source": public["source"]},
        "privacy": {
            "epsilon": p["epsilon_prv"], "delta": p["delta"], "accountant": "PRV", "epsilon_rdp": p["epsilon_rdp"],
            "neighbours": "training sets that differ by one sample added or removed (after a test part was cut off)",
            "sampling": "Poisson: each sample in each batch with probability q, independently",
            "q": p["q"], "B": p["B"], "T": p["T"], "sigma": p["sigma"],
            "releases": [{"purpose": part["purpose"], "sigma": part["sigma"], "releases": part["releases"]}
                         for part in p["parts"]],
            "noise": "Gaussian, in float64, from the operating system's entropy, rounded to 2^-20 of its deviation",
            "covers": "the weights and this card",
            "does_not_cover": "a choice of method and settings that looked at the private data; the number of samples "
                              "and of classes",
        },
    }


def markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    p, public = card["privacy"], card["public_data"]
    source = "none" if public is None else f"{public['name']}, {public['size']} images ({public['source']})"
    rows = [("model", f"{card['model']['name']}, {card['model']['classes']} classes, "
                      f"{card['model']['parameters']:,} parameters"),
            ("input", card["model"]["input"]), ("method", f"{card['method']['label']}: {card['method']['about']}"),
            ("private data", card["private_data"]["name"]), ("public data", source),
            ("sampling", f"{p['sampling']}; q = {p['q']:.6g}, B = {p['B']}"), ("steps", f"T = {p['T']}"),
            *[(part["purpose"], f"{part['releases']} releases, noise multiplier sigma = {part['sigma']:.6g}")
              for part in p["releases"]],
            ("accountant", f"{p['accountant']} (RDP: epsilon = {p['epsilon_rdp']:.4g})"), ("noise", p["noise"]),
            ("covered", p["covers"]), ("not covered", p["does_not_cover"]), ("made by", card["made_by"])]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (f"# A private model\n\nThese weights are ({p['epsilon']:.4g}, {p['delta']:g})-differentially private for "
            f"{p['neighbours']}.\n\n| | |\n| --- | --- |\n{table}\n")
