"""What an installation relies on: old Pythons and old torch can read the core, and importing it stays light.

`compat_faults` reads source and names what Python 3.8 or torch 2.0 would not have. It knows the names listed here and
no others: a guard against slips, not a proof. Code under an `if` that asks for a version or `hasattr` is let through.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Optional

import pytest

import rl_stagger

REPO = Path(__file__).resolve().parents[1]
# Adapters may use what their simulator's own Python and torch have.
ADAPTERS = {Path("rl_stagger/envs/mjlab.py")}
SOURCES = sorted(
    path.relative_to(REPO) for top in ("rl_stagger", "scripts", "benchmarks") for path in (REPO / top).rglob("*.py")
)
CORE = [path for path in SOURCES if path not in ADAPTERS]

# Full name -> the release that brought it.
PYTHON_NAMES = {
    "functools.cache": "3.9",
    "importlib.resources.files": "3.9",
    "math.lcm": "3.9",
    "math.nextafter": "3.9",
    "typing.Annotated": "3.9",
    "argparse.BooleanOptionalAction": "3.9",
    "graphlib": "3.9",
    "zoneinfo": "3.9",
    "contextlib.aclosing": "3.10",
    "inspect.get_annotations": "3.10",
    "itertools.pairwise": "3.10",
    "types.NoneType": "3.10",
    "types.UnionType": "3.10",
    "typing.Concatenate": "3.10",
    "typing.ParamSpec": "3.10",
    "typing.TypeAlias": "3.10",
    "typing.TypeGuard": "3.10",
    "contextlib.chdir": "3.11",
    "datetime.UTC": "3.11",
    "enum.StrEnum": "3.11",
    "tomllib": "3.11",
    "typing.LiteralString": "3.11",
    "typing.Never": "3.11",
    "typing.NotRequired": "3.11",
    "typing.Required": "3.11",
    "typing.Self": "3.11",
    "typing.Unpack": "3.11",
    "typing.assert_never": "3.11",
    "itertools.batched": "3.12",
    "typing.override": "3.12",
}
TORCH_NAMES = {
    "torch.compiler": "2.1",
    "torch.export": "2.1",
    "torch.float8_e4m3fn": "2.1",
    "torch.nn.utils.parametrizations.weight_norm": "2.1",
    "torch.distributed.device_mesh": "2.2",
    "torch.distributed.init_device_mesh": "2.2",
    "torch.nn.attention": "2.2",
    "torch.unravel_index": "2.2",
    "torch.utils.deterministic": "2.2",
    "torch.amp.GradScaler": "2.3",
    "torch.get_default_device": "2.3",
    "torch.uint16": "2.3",
    "torch.uint32": "2.3",
    "torch.amp.custom_fwd": "2.4",
    "torch.amp.is_autocast_available": "2.4",
    "torch.get_autocast_dtype": "2.4",
    "torch.library.custom_op": "2.4",
    "torch.nn.RMSNorm": "2.4",
    "torch.nn.functional.rms_norm": "2.4",
    "torch.serialization.add_safe_globals": "2.4",
    "torch.distributed.tensor": "2.5",
    "torch.get_device_module": "2.5",
    "torch.nn.Buffer": "2.5",
    "torch.optim.Adafactor": "2.5",
    "torch.serialization.safe_globals": "2.5",
    "torch.accelerator": "2.6",
    "torch.distributed.fsdp.fully_shard": "2.6",
    "torch.nn.utils.clip_grads_with_norm_": "2.6",
    "torch.nn.utils.get_total_norm": "2.6",
    "torch.optim.Muon": "2.9",
}
# Last part of the called name -> keyword -> release.
KEYWORDS = {
    "basicConfig": {"encoding": "Python 3.9"},
    "sample": {"counts": "Python 3.9"},
    "TemporaryDirectory": {"ignore_cleanup_errors": "Python 3.10"},
    "dataclass": {"slots": "Python 3.10", "kw_only": "Python 3.10", "match_args": "Python 3.10"},
    "field": {"kw_only": "Python 3.10"},
    "bisect": {"key": "Python 3.10"},
    "bisect_left": {"key": "Python 3.10"},
    "bisect_right": {"key": "Python 3.10"},
    "entry_points": {"group": "Python 3.10"},
    "write_text": {"newline": "Python 3.10"},
    "zip": {"strict": "Python 3.10"},
    "load": {"mmap": "torch 2.1"},
    "load_state_dict": {"assign": "torch 2.1"},
    "scaled_dot_product_attention": {"scale": "torch 2.1", "enable_gqa": "torch 2.5"},
    "init_process_group": {"device_id": "torch 2.3"},
    "kaiming_uniform_": {"generator": "torch 2.2"},
    "orthogonal_": {"generator": "torch 2.2"},
    "trunc_normal_": {"generator": "torch 2.2"},
    "xavier_uniform_": {"generator": "torch 2.2"},
}
METHODS = {
    "removeprefix": "Python 3.9",
    "removesuffix": "Python 3.9",
    "is_relative_to": "Python 3.9",
    "with_stem": "Python 3.9",
    "bit_count": "Python 3.10",
    "add_note": "Python 3.11",
    "set_submodule": "torch 2.5",
}
GENERICS = {"dict", "frozenset", "list", "set", "tuple", "type", "deque", "defaultdict", "OrderedDict", "Counter"}
TYPE_WORDS = {"bool", "bytes", "dict", "float", "int", "list", "set", "str", "tuple", "Tensor"}


def compat_faults(source: str) -> List[str]:
    """What in `source` Python 3.8 or torch 2.0 would not have, as "line: what"."""
    try:
        tree = ast.parse(source, feature_version=(3, 8))
    except SyntaxError as error:
        return [f"{error.lineno}: syntax ({error.msg})"]
    lazy = "from __future__ import annotations" in source
    aliases = _aliases(tree)
    return [
        f"{getattr(node, 'lineno', 0)}: {fault}" for node in _evaluated(tree, lazy) for fault in _faults(node, aliases)
    ]


def _aliases(tree: ast.AST) -> Dict[str, str]:
    """Name in this file -> full name of what was imported."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


def _evaluated(node: ast.AST, lazy: bool, is_setting: bool = False) -> Iterator[ast.AST]:
    """`node` and what runs under it: no annotations where they are lazy, nothing behind a version check.

    `is_setting`: a dataclass's field, whose type counts as run, since settings are read from their types.
    """
    yield node
    is_dataclass = isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(d) for d in node.decorator_list)
    for name, value in ast.iter_fields(node):
        if lazy and not is_setting and name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_guarded(child):
                yield from _evaluated(child, lazy, is_dataclass and isinstance(child, ast.AnnAssign))


def _is_guarded(node: ast.AST) -> bool:
    if not isinstance(node, (ast.If, ast.IfExp)):
        return False
    names = {n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(node.test)}
    return any("version" in name.lower() or name in ("hasattr", "TYPE_CHECKING") for name in names)


def _full_name(node: ast.AST, aliases: Dict[str, str]) -> Optional[str]:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return None


def _faults(node: ast.AST, aliases: Dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (fault for name in node.names for fault in _newer(name.name))
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (fault for name in node.names for fault in _newer(f"{node.module}.{name.name}"))
    elif isinstance(node, ast.Attribute):
        yield from _newer(_full_name(node, aliases) or "", exact=True)
        if node.attr in METHODS:
            yield f".{node.attr} ({METHODS[node.attr]})"
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        releases = KEYWORDS.get(called, {})
        yield from (f"{called}({k.arg}=) ({releases[k.arg]})" for k in node.keywords if k.arg in releases)
    elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in GENERICS:
        yield f"{node.value.id}[...] evaluated at run time (Python 3.9)"  # type: ignore[attr-defined]
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.BitOr):
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        if any(isinstance(s, (ast.Dict, ast.DictComp)) for s in sides):
            yield "dict | dict (Python 3.9)"
        if any(getattr(s, "id", "") in TYPE_WORDS or getattr(s, "value", 0) is None for s in sides):
            yield "X | Y of types evaluated at run time (Python 3.10)"


def _newer(full_name: str, exact: bool = False) -> Iterator[str]:
    """Faults of a full name; unless `exact`, also where a listed name is only its beginning."""
    for kind, names in (("Python", PYTHON_NAMES), ("torch", TORCH_NAMES)):
        for name, release in names.items():
            if full_name == name or (not exact and full_name.startswith(name + ".")):
                yield f"{name} ({kind} {release})"


FUTURE = "from __future__ import annotations\n"
BAD = [
    ("match x:\n    case 1: pass", "syntax"),
    ("with (open(a) as b, open(c) as d): pass", "syntax"),
    ("def f(x: list[int]): pass", "list[...]"),
    ("def f() -> int | None: pass", "X | Y"),
    ("x: dict[str, int] = {}", "dict[...]"),
    (FUTURE + "Pair = tuple[int, int]", "tuple[...]"),
    (FUTURE + "ok = isinstance(x, int | float)", "X | Y"),
    (FUTURE + "@dataclass(frozen=True)\nclass A:\n    x: list[int]", "list[...]"),
    (FUTURE + "@dataclasses.dataclass\nclass A:\n    x: int | None = None", "X | Y"),
    ("d = {**a} | b", "dict | dict"),
    ("d |= {1: 2}", "dict | dict"),
    ("import torch.nn as nn\nnorm = nn.RMSNorm(3)", "torch 2.4"),
    ("from torch import nn\nnorm = nn.functional.rms_norm(x)", "torch 2.4"),
    ("from torch.distributed.tensor import DTensor", "torch 2.5"),
    ("if ready:\n    import tomllib", "Python 3.11"),
    *((f"x = {generic}[int]", f"{generic}[...]") for generic in sorted(GENERICS)),
    *((f"x = a.{method}(b)", release) for method, release in METHODS.items()),
]
for _called, _keywords in KEYWORDS.items():
    for _keyword, _release in _keywords.items():
        BAD += [(f"x = {owner}{_called}(b, {_keyword}=c)", _release) for owner in ("", "a.")]
for _kind, _names in (("Python", PYTHON_NAMES), ("torch", TORCH_NAMES)):
    for _name, _release in _names.items():
        _module, _, _last = _name.rpartition(".")
        BAD.append((f"from {_module} import {_last}" if _module else f"import {_name}", f"{_kind} {_release}"))
        if _module:
            BAD.append((f"import {_module}\nx = {_name}", f"{_kind} {_release}"))
GOOD = [
    FUTURE + "def f(x: list[int]) -> int | None:\n    y: dict[str, int] = {}",
    FUTURE + "@dataclass(frozen=True)\nclass A:\n    x: List[int]\n    def f(self, x: int | None): pass",
    "import sys\nif sys.version_info >= (3, 11):\n    import tomllib",
    "import torch\nx = torch.accelerator.current_accelerator() if hasattr(torch, 'accelerator') else None",
    "done = terminated | truncated\nmask |= done",
    "import torch\nx = torch.compile(f)\ny = zip(a, b)\nz = torch.load(p, weights_only=True)",
    "from .compiler import export\nexport(x)",
    "if (n := 3) > 2: pass",
]


@pytest.mark.parametrize(("source", "fault"), BAD)
def test_checker_sees_what_is_too_new(source: str, fault: str) -> None:
    assert fault in "\n".join(compat_faults(source))


@pytest.mark.parametrize("source", GOOD)
def test_checker_lets_old_code_through(source: str) -> None:
    assert compat_faults(source) == []


@pytest.mark.parametrize("path", CORE, ids=str)
def test_core_keeps_to_python_3_8_and_torch_2_0(path: Path) -> None:
    faults = compat_faults((REPO / path).read_text(encoding="utf-8"))
    assert not faults, "\n".join(f"{path}:{fault}" for fault in faults)


@pytest.mark.parametrize("path", sorted(ADAPTERS), ids=str)
def test_adapters_are_python_3_8_syntax(path: Path) -> None:
    ast.parse((REPO / path).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_import_is_light_and_shadows_nothing(tmp_path: Path) -> None:
    """Asked of a fresh interpreter: this one has long imported more."""
    heavy = ["hydra", "tensorboard", "matplotlib", "rich", "mjlab", "wandb", "scipy"]
    code = f"""if True:
        import sys, rl_stagger, logging
        heavy = [name for name in {heavy} if name in sys.modules]
        assert not heavy, f"import rl_stagger imports {{heavy}}"
        assert hasattr(logging, "getLogger"), "rl_stagger/logging hides the standard library's logging"
    """
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_version_is_one() -> None:
    source = (REPO / "rl_stagger" / "__init__.py").read_text(encoding="utf-8")
    written = re.findall(r'^__version__ = "(\d+\.\d+\.\d+\S*)"$', source, flags=re.MULTILINE)
    assert written == [rl_stagger.__version__], "hatch reads the version from this line"
    assert rl_stagger.__version__ in (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert re.search(r'^\[tool\.hatch\.version\]\npath = "rl_stagger/__init__\.py"$', project, flags=re.MULTILINE)


def test_every_folder_is_a_package() -> None:
    """A folder without __init__.py would import from a checkout by chance and read as an accident in a wheel."""
    folders = {path.parent for path in SOURCES if path.parts[0] == "rl_stagger"}
    assert [str(folder) for folder in sorted(folders) if not (REPO / folder / "__init__.py").is_file()] == []
