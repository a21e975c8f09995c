"""Watch a trained policy: `python scripts/play.py run=RUN_DIR video=out.mp4`. The same as `rl-stagger play`."""

import sys

from rl_stagger.cli import main

if __name__ == "__main__":
    sys.exit(main(["play", *sys.argv[1:]]))
