"""Lines of code: without blank lines, comments and docstrings; and those that compute in a kernel."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

__all__ = ["code_lines", "kernel_lines"]

_NOTHING = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines of a file that hold code."""
    text = path.read_text()
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOTHING:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return used


def kernel_lines(path: Path) -> set[int]:
    """Those of them inside functions that take a `KernelContext`: what a kernel computes, not what a rule says."""
    inside: set[int] = set()
    for node in _functions(ast.parse(path.read_text())):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if any(a.annotation is not None and "KernelContext" in ast.unparse(a.annotation) for a in arguments):
            inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return inside & code_lines(path)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
