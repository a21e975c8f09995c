"""Would staggered resets help? `python scripts/doctor.py task=TASK` or `run=RUN_DIR`, as `rl-stagger doctor`."""

import sys

from rl_stagger.cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
