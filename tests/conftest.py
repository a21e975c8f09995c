"""One thread for torch, and `helpers.*` importable: in pytest's importlib mode a test's folder is not on the path."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

TESTS = str(Path(__file__).resolve().parent)
if TESTS not in sys.path:
    sys.path.append(TESTS)
