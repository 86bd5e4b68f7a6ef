"""Values written as Python, read without running them.

In:  text such as `dict(net_arch=[400, 300], activation_fn=nn.ReLU)`, as rl-zoo's files have it.
Out: plain data; a dotted name becomes its last word.
Invariant: nothing is evaluated. What is neither data nor a name is refused.
"""

from __future__ import annotations

import ast
from typing import Any

from holdall.errors import ArgumentError


def read_literal(text: str, argument: str) -> Any:
    """Read one value."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArgumentError(
            f"{argument} ({text!r}) is no plain value ({error}); write numbers, lists and dicts"
        ) from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return _called(node)
    if isinstance(node, ast.Attribute | ast.Name):
        return node.attr if isinstance(node, ast.Attribute) else node.id
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("'**' is not data")
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _number(node.left) * _number(node.right)
    return ast.literal_eval(node)


def _called(node: ast.Call) -> dict[str, Any]:
    if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args:
        raise ValueError(f"{ast.unparse(node)} is a call")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("'**' is not data")
    return {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}


def _number(node: ast.expr) -> float:
    value = _value(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{ast.unparse(node)} is no number")  # noqa: TRY004 as every other refusal here
    return value
