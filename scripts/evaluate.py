"""Evaluate a trained policy: `python scripts/evaluate.py run=RUN_DIR`. The same as `rl-stagger evaluate`."""

import sys

from rl_stagger.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
