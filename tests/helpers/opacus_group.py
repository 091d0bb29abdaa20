"""For test_opacus_group.py: the same private steps by one process, or by two that have half of each batch.

    torchrun --nproc-per-node 2 opacus_group.py OUT     each process writes its weights to OUT/<rank>.pt
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.optimizers import DistributedDPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd.group import connected
from dpngd.noise import stream
from dpngd.opacus import DPNGD

STEPS, B = 5, 16
MODES = {"rate": {"lambda_safe": 0.1}, "free": {}}


def steps(mode, group):
    """The weights after STEPS steps, how many samples this process has seen, and what the engine has counted."""
    g = stream(0, "opacus-group")
    x, y = torch.randn(STEPS * B, 1, 8, 8, generator=g), torch.randint(4, (STEPS * B,), generator=g)
    public = torch.randn(60, 1, 8, 8, generator=g)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4))
    wrapped = DPDDP(model) if group.size > 1 else model
    engine = PrivacyEngine(accountant="prv")
    module, optimizer, _ = engine.make_private(
        module=wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.5), noise_multiplier=1.0,
        max_grad_norm=0.5, noise_generator=torch.Generator().manual_seed(5),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=B))
    assert isinstance(optimizer, DistributedDPOptimizer) == (group.size > 1)
    optimizer = DPNGD(optimizer, module, public, T=STEPS, **MODES[mode])
    for t in range(STEPS):
        rows = slice(t * B, (t + 1) * B)
        mine = group.share(B)
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows][mine]), y[rows][mine]).backward()
        optimizer.step()
    return {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "seen": optimizer.seen,
            "B": optimizer.expected_batch_size, "history": engine.accountant.history}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with connected() as group:
        torch.save({mode: steps(mode, group) for mode in MODES}, Path(sys.argv[1]) / f"{group.rank}.pt")
