"""For nbval: the stored outputs are those of results/ alone, so what this machine has in its own store is not read."""

import os
import tempfile

os.environ["DPNGD_STORE"] = tempfile.mkdtemp(prefix="dpngd-no-store-")
