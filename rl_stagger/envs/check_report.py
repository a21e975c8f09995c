"""What the contract checker found, and where in somebody's source a fix would go."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Tuple

import rl_stagger
from rl_stagger.envs.base import VecEnv
from rl_stagger.errors import ContractError

ERROR, WARNING, SKIPPED, OK = "error", "warning", "skipped", "ok"
STEP_FIELDS = ("obs", "reward", "terminated", "truncated", "final_obs", "valid", "info")
PACKAGE = Path(rl_stagger.__file__).resolve().parent


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say."""

    level: str
    """error: the contract is broken. warning: most likely not what was meant. skipped: could not be looked at. ok."""
    check: str
    seen: str
    contract: str = ""
    """What the contract says, for errors and warnings."""
    where: str = ""
    """The line that a fix would touch, e.g. "my_env.py:57 in step"."""

    def __str__(self) -> str:
        text = f"{self.level}: {self.check}: {self.seen}"
        text += f"\n    contract: {self.contract}" if self.contract else ""
        return text + (f"\n    at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Report:
    """All findings about one environment, in the order of the checks; every check is in it at least once."""

    env: str
    """Name and sizes of what was checked."""
    findings: Tuple[Finding, ...]
    seconds: float

    def of_level(self, level: str) -> List[Finding]:
        return [finding for finding in self.findings if finding.level == level]

    @property
    def errors(self) -> List[Finding]:
        return self.of_level(ERROR)

    @property
    def warnings(self) -> List[Finding]:
        return self.of_level(WARNING)

    @property
    def skipped(self) -> List[Finding]:
        return self.of_level(SKIPPED)

    @property
    def ok(self) -> bool:
        """True where nothing breaks the contract; there may be warnings."""
        return not self.errors

    @property
    def summary(self) -> str:
        names = ((ERROR, "errors"), (WARNING, "warnings"), (SKIPPED, "skipped"), (OK, "ok"))
        counts = ", ".join(f"{len(self.of_level(level))} {name}" for level, name in names)
        return f"{'keeps the contract' if self.ok else 'breaks the contract'}: {counts} ({self.seconds:.1f} s)"

    def raise_if_broken(self) -> None:
        """Raise ContractError with every error in it, if there is one."""
        if self.errors:
            raise ContractError(f"{self.env} breaks the contract\n" + "\n".join(str(error) for error in self.errors))

    def __str__(self) -> str:
        return "\n".join([self.env, *(str(finding) for finding in self.findings), self.summary])


def print_report(report: Report) -> None:
    """A table on standard output: a check a row, what is wrong with its contract and its place below."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {ERROR: "bold red", WARNING: "yellow", SKIPPED: "dim", OK: "green"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for f in report.findings:
        text = Text(f.seen)
        if f.contract:
            text.append(f"\ncontract: {f.contract}", style="dim")
        if f.where:
            text.append(f"\nat {f.where}", style="cyan")
        table.add_row(Text(f.level, style=colours[f.level]), Text(f.check), text)
    console = Console(highlight=False)
    console.print(Text(report.env, style="bold"))
    console.print(table)
    console.print(Text(report.summary, style="bold"))


# -- the line that a fix would touch ----------------------------------------------------------------------------------
def locate(env: VecEnv, method: str, word: str = "") -> str:
    """ "file:line in method" of the class that wrote `method`; "" where there is no source.

    `word`: a field of `Step`: the line that gives it its value; "return": the method's last return; "": its first line.
    """
    owner = _owner(env, method)
    if owner is None:
        return ""
    if owner is VecEnv:
        try:
            line = inspect.getsourcelines(type(env))[1]
            return f"{_short(inspect.getsourcefile(type(env)))}:{line} in class {type(env).__name__}, without {method}"
        except (OSError, TypeError):
            return f"class {type(env).__name__}, without {method}"
    function = _function(vars(owner)[method])
    try:
        lines, first = inspect.getsourcelines(function)
        path = _short(inspect.getsourcefile(function))
    except (OSError, TypeError):
        return f"{owner.__name__}.{method}"
    return f"{path}:{first + _line_within(lines, word)} in {method}"


def last_line(env: VecEnv, error: BaseException) -> str:
    """ "file:line in function" of the last frame of `error` in the env's own files, or at least outside of ours."""
    own = {_source(owner) for owner in (*type(env).__mro__, *type(env.unwrapped).__mro__)} - {_source(VecEnv), None}
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not _is_the_checkers(f.filename)]
    chosen = [f for f in theirs if os.path.realpath(f.filename) in own] or theirs
    return f"{_short(chosen[-1].filename)}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else ""


def _owner(env: VecEnv, method: str) -> Optional[type]:
    return next((owner for owner in type(env).__mro__ if method in vars(owner)), None)


def writes(env: VecEnv, method: str) -> bool:
    """True where the env's class, or one it derives from, has a `method` of its own."""
    return _owner(env, method) not in (None, VecEnv)


def _function(value: Any) -> Callable[..., Any]:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return inspect.unwrap(value)


def _line_within(lines: List[str], word: str) -> int:
    """Index within `lines`, a function's source, of the line that `word` is about."""
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def "))), 0)
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (SyntaxError, ValueError):
        return start
    if word == "return":
        found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Return)]
        return max(found) - 1 if found else start
    values = list(_values_of(tree, word))
    if not values:
        return start
    value = max(values, key=lambda node: node.lineno)
    if isinstance(value, ast.Name):
        written = [line for line in _assignments(tree, value.id) if line <= value.lineno]
        return max(written, default=value.lineno) - 1
    return value.lineno - 1


def _values_of(tree: ast.AST, field: str) -> Iterator[ast.expr]:
    """What is given for a field of `Step`, in every call that makes or replaces one."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or field not in STEP_FIELDS:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        yield from (keyword.value for keyword in node.keywords if keyword.arg == field and name in ("Step", "replace"))
        if name == "Step" and len(node.args) > STEP_FIELDS.index(field):
            yield node.args[STEP_FIELDS.index(field)]


def _assignments(tree: ast.AST, name: str) -> Iterator[int]:
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            names = [
                n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)
            ]
            if name in names:
                yield node.lineno


def _source(owner: type) -> Optional[str]:
    try:
        path = inspect.getsourcefile(owner)
    except TypeError:
        return None
    return os.path.realpath(path) if path else None


def _is_the_checkers(path: str) -> bool:
    """True for the checker's own files and the contract's."""
    full = Path(path).resolve()
    return full.parent == PACKAGE / "envs" and (full.name.startswith("check") or full.name == "base.py")


def _short(path: Optional[str]) -> str:
    """Below the current folder or the package as seen from there, else in full."""
    if path is None:
        return "?"
    full = Path(path).resolve()
    for root in (Path.cwd(), PACKAGE.parent):
        if root in full.parents:
            return full.relative_to(root).as_posix()
    return str(full)
