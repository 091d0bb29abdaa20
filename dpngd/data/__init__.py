"""Private and public images: where they come from, how they are split, and the check that the two never overlap."""

from dpngd.data.private import PRIVATE, Private, load_private
from dpngd.data.public import PUBLIC, Public, check_disjoint, load_public

__all__ = ["PRIVATE", "PUBLIC", "Private", "Public", "check_disjoint", "load_private", "load_public"]
