"""The public sets that need no download (photos, noise, dead-leaves): made in `dpngd.images`, beside the optimizer."""

from dpngd.images import LARGEST, dead_leaves, noise, photos

__all__ = ["LARGEST", "dead_leaves", "noise", "photos"]
