"""What two processes of one thread each do in the time in which one process works with two threads: what two threads
could reach if nothing in a step were left to one of them, and they shared no interpreter lock. On a quiet machine:

    python tests/helpers/two_threads.py small wrn-10-1 resnet-20
"""

import sys

from dpngd.suite import bench
from dpngd.suite.bench import Layout

CONTENDERS = ("plain", "dp-sgd", "dp-ngd")


def main(networks):
    for network in networks:
        pace = {(c, n): bench.pace_of(Layout(*n), network, c, seconds=10.0, batch=bench.BATCH)
                for c in CONTENDERS for n in ((1, 2), (2, 1))}
        print(f"{network}, samples per second: "
              + "; ".join(f"{c} {pace[c, (1, 2)]:.0f} with two threads, {pace[c, (2, 1)]:.0f} in two processes"
                          for c in CONTENDERS))
        for a, b in (("dp-sgd", "plain"), ("dp-ngd", "dp-sgd")):
            print(f"  {a} / {b} with two threads: {pace[b, (1, 2)] / pace[a, (1, 2)]:.2f}, at least "
                  f"{pace[b, (1, 2)] / pace[a, (2, 1)]:.2f} by {a} in two processes")


if __name__ == "__main__":
    main(sys.argv[1:] or ["small"])
