"""Everything of a profile with one command: train what is missing, run every notebook, write figures and the report.

    python run_all.py                          the quick profile: minutes on two cores
    python run_all.py --profile cpu            redraw the shipped results; nothing is trained
    python run_all.py --profile cpu --train    go on with the runs that are still missing (hours; resumable)
    python run_all.py --profile cpu --export   ship what was trained: results/cpu.jsonl
    python run_all.py --profile paper --shard 2/8   train the second of eight parts of the runs, and no more
    python run_all.py --profile paper --list   what the paper's setting would take

Results land in figures/<profile>/. Started again after an interruption, it goes on where it was.
`dpngd run` is the same.
"""

import sys

from dpngd.errors import exit_code


def main() -> int:
    from dpngd.suite.command import run

    return run(sys.argv[1:], prog="run_all.py")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
