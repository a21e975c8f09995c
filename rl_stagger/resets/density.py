"""Densities over the horizon: how many environments a user wants at which phase. Pure functions, on the CPU.

A density is a tensor [H] float64, one probability for each step of the episode; its sum is 1.
"""

from __future__ import annotations

import ast
import math
import operator
from typing import Any, Callable, Dict, Sequence, Union

import torch
from torch import Tensor

from rl_stagger.errors import nearest

Density = Union[str, Sequence[float]]
"""An expression of u = phase / H, or weights of equal parts of the horizon."""

_FUNCTIONS: Dict[str, Callable[..., Any]] = {
    "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "sin": math.sin, "cos": math.cos, "abs": abs,
    "min": min, "max": max,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_OPERATORS: Dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def density_over(wanted: Density, horizon_steps: int) -> Tensor:
    """The density [H] of weights (part i of W covers phases in [i H / W, (i + 1) H / W)) or of an expression, which is
    read at the middle of every step, u = (p + 0.5) / H.

    Raises ValueError for unknown names, and for weights that are negative, not finite, or zero everywhere.

    >>> density_over([1, 3], 4).tolist()
    [0.125, 0.125, 0.375, 0.375]
    """
    if isinstance(wanted, str):
        tree = _parse(wanted)
        try:
            weights = [_value(tree, (p + 0.5) / horizon_steps, wanted) for p in range(horizon_steps)]
        except RecursionError:
            raise ValueError("nested too deeply") from None
    elif len(wanted) == 0:
        raise ValueError("at least one weight")
    else:
        weights = [float(wanted[p * len(wanted) // horizon_steps]) for p in range(horizon_steps)]
    if len(wanted) > horizon_steps and not isinstance(wanted, str):
        raise ValueError(f"{len(wanted)} weights for a horizon of {horizon_steps} steps; at most one a step")
    bad = next((w for w in weights if not math.isfinite(w) or w < 0), None)
    if bad is not None:
        raise ValueError(f"a weight of {bad:g}; weights are finite and at least 0")
    largest = max(weights)
    if largest <= 0:
        raise ValueError("all weights are 0; at least one must be above")
    scaled = torch.tensor(weights, dtype=torch.float64) / largest  # their sum could be infinite
    return scaled / scaled.sum()


def first_share(density: Tensor, share: float) -> Tensor:
    """`density` [H] cut off at `share` of the horizon (at least one step) and scaled to sum 1.

    Raises ValueError where nothing is left of it.
    """
    steps = max(1, min(len(density), round(share * len(density))))
    kept = torch.zeros_like(density)
    kept[:steps] = density[:steps]
    if float(kept.sum()) <= 0:
        raise ValueError(f"nothing of the density lies in the first {share:g} of the horizon")
    return kept / kept.sum()


def nonincreasing(density: Tensor) -> Tensor:
    """The smallest non-increasing function above `density` [B], scaled to sum 1; on any device.

    What early cuts alone can hold: they take environments out of late phases and put them at phase 0, so no phase can
    have more than those before it.

    >>> nonincreasing(torch.tensor([0.1, 0.4, 0.3, 0.2])).tolist()  # 0.4, 0.4, 0.3, 0.2 over 1.3
    [0.307..., 0.307..., 0.230..., 0.153...]
    """
    above = density.flip(0).cummax(0).values.flip(0)
    return above / above.sum()


def binned(density: Tensor, num_bins: int) -> Tensor:
    """Probability of each of `num_bins` equal parts of the horizon, by the rule of `phase_histogram`; [num_bins]."""
    steps = torch.arange(len(density))
    return torch.zeros(num_bins, dtype=density.dtype).scatter_add_(0, steps * num_bins // len(density), density)


def _parse(text: str) -> ast.AST:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an expression of u, e.g. '1 + 3 * u' or 'exp(-4 * u)'") from None


def _value(node: ast.AST, u: float, text: str) -> float:
    """The expression's value at u. Numbers, u, + - * / **, comparisons and the functions named above; nothing else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return _apply(float, [node.value], u)
    if isinstance(node, ast.Name):
        if node.id == "u":
            return u
        if node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        raise ValueError(f"'{node.id}' is not known; {nearest(node.id, ['u', *_CONSTANTS, *_FUNCTIONS])}")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is None:
            raise ValueError(f"'{node.func.id}' is not known; {nearest(node.func.id, _FUNCTIONS)}")
        return _apply(function, [_value(a, u, text) for a in node.args], u)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _apply(_OPERATORS[type(node.op)], [_value(node.left, u, text), _value(node.right, u, text)], u)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _apply(_OPERATORS[type(node.op)], [_value(node.operand, u, text)], u)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        sides = [_value(node.left, u, text), _value(node.comparators[0], u, text)]
        return float(_OPERATORS[type(node.ops[0])](*sides))
    raise ValueError("only numbers, u, + - * / **, < >, and " + ", ".join(sorted(_FUNCTIONS)))


def _apply(function: Callable[..., Any], arguments: Sequence[float], u: float) -> float:
    try:
        value = function(*arguments)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ValueError(f"at u = {u:g}: {error}") from None
    if isinstance(value, complex):
        raise ValueError(f"at u = {u:g}: not a real number")
    return float(value)
