"""What CI cannot run: the core keeps to Python 3.8's syntax and to names that torch 2.0 has.

Static, so it sees names and not behaviour; keyword arguments that came later go unseen. `make test-py38` runs the core
on Python 3.8. The lists are dir(torch 2.13.0) without dir(torch 2.0.1), and the same of modules and of Tensor.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Iterator

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 9), reason="ast.unparse; the interpreter itself judges there")
ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "rl_stagger").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])

NEWER = {
    "torch": """AcceleratorError Event GradScaler OutOfMemoryError accelerator bit compiler cond empty_permuted export
        float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz get_autocast_dtype get_default_device
        get_device_module hash_tensor jagged mtia newaxis nonzero_static rms_norm set_autocast_dtype sym_sqrt sym_sum
        thread_safe_generator uint16 uint32 uint64 unravel_index while_loop xpu""",
    "torch.nn": """Buffer CircularPad1d CircularPad2d CircularPad3d LPPool3d LinearCrossEntropyLoss RMSNorm ZeroPad1d
        ZeroPad3d attention""",
    "torch.nn.functional": "grouped_mm linear_cross_entropy lp_pool3d rms_norm scaled_mm",
    "torch.optim": "Adafactor Muon swap_in_optimizer_params_and_state",
    "torch.distributions": "GeneralizedPareto InverseGamma",
    "torch.cuda": """MemPool caching_allocator_disabled device_memory_used get_per_process_memory_fraction
        get_stream_from_external host_memory_stats power_draw reset_peak_host_memory_stats temperature clock_rate""",
    "torch.func": "debug_unwrap rearrange",
}
NEWER_OF_TENSORS = """const_data_ptr dim_order grad_dtype hash_tensor module_load nonzero_static
    register_post_accumulate_grad_hook""".split()
"""Without those that other things have as well (index, itemsize, nbytes)."""
BUILTIN_GENERICS = {"list", "dict", "tuple", "set", "frozenset", "type"}


def faults(source: str) -> Iterator[str]:
    """What Python 3.8 or torch 2.0 could not take."""
    try:
        tree = ast.parse(source, feature_version=(3, 8))
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    lazy = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.names[0].name == "annotations"
        for node in tree.body
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in NEWER.get(owner, "").split() or node.attr in NEWER_OF_TENSORS:
                yield f"line {node.lineno}: {owner}.{node.attr} is newer than torch 2.0"
            if node.attr in ("removeprefix", "removesuffix"):
                yield f"line {node.lineno}: str.{node.attr} is newer than Python 3.8"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "zip" and node.keywords:
            yield f"line {node.lineno}: zip(strict=) is newer than Python 3.8"
        for annotation in _evaluated(node, lazy):
            for part in ast.walk(annotation):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr):
                    yield f"line {part.lineno}: X | Y is evaluated here; Optional or Union"
                if isinstance(part, ast.Subscript) and ast.unparse(part.value) in BUILTIN_GENERICS:
                    yield f"line {part.lineno}: {ast.unparse(part)} is evaluated here; List, Dict, ..."


def _evaluated(node: ast.AST, lazy: bool) -> Iterator[ast.expr]:
    """Annotations that are evaluated as the program runs: all without the __future__ import, with it still those of
    dataclasses, which settings are read from."""
    decorated = getattr(node, "decorator_list", [])
    if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(name) for name in decorated):
        yield from (item.annotation for item in node.body if isinstance(item, ast.AnnAssign))
    if lazy:
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        yield from (argument.annotation for argument in arguments if argument is not None and argument.annotation)
        if node.returns is not None:
            yield node.returns
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_core_keeps_to_python_3_8_and_torch_2_0(path: Path) -> None:
    assert list(faults(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "match x:\n    case 1: pass",
        "with (open(a) as f, open(b) as g): pass",
        "x = torch.uint16",
        "torch.nn.RMSNorm(3)",
        "mask.nonzero_static(size=3)",
        "def f(x: int | None): pass",
        "def f() -> list[int]: pass",
        "from __future__ import annotations\n@dataclass(frozen=True)\nclass A:\n    x: list[int] = None",
        "name.removeprefix('a')",
        "zip(a, b, strict=True)",
    ],
)
def test_what_is_newer_is_found(source: str) -> None:
    assert list(faults(source))


def test_what_is_old_enough_is_not() -> None:
    source = "from __future__ import annotations\ndef f(x: int | None) -> list[int]: return torch.where(x)\n"
    assert list(faults(source)) == []
