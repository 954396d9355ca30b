"""A tool for a model that cannot count: `calculate`, for the agent loop `tools`.

It is not async, so each call runs in a process that is killed when it takes too long: `9 ** 9 ** 9 ** 9` harms nobody.
"""

import ast
import operator

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression, such as 3 * (4 + 5)."""
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError(f"only numbers, + - * / ** and brackets, not {ast.unparse(node)!r}")
