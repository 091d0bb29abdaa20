"""A run, a record and a second store on the same folder, for the tests of the result store."""

from dpngd.suite.store import Store
from dpngd.training.config import RunConfig


def config(seed=0, **changes):
    base = {
        "method": "dp-sgd",
        "data": "digits",
        "model": "small",
        "epsilon": 2,
        "B": 256,
        "T": 40,
        "eta": 1,
        "C": 1,
    }
    return RunConfig.from_dict({**base, "seed": seed, **changes})


RECORD = {"status": "ok", "accuracy": [0.5, 0.875], "seconds": {"gradients": 1.25}}


def fresh(store, **options):
    return Store(store.profile, root=store.folder.parent, results=store.shipped_path.parent, **options)
