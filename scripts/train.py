"""Train a policy: `python scripts/train.py task=skill_chain reset=staggered`. The same as `rl-stagger train`."""

import sys

from rl_stagger.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
