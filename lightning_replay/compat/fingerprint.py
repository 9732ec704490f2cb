# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Fingerprints of functions: what the source does, without how it is written.

Two spellings of one behaviour share a fingerprint: docstrings, comments, annotations, ``pass`` and ``@override`` do not
count. The text that is hashed is our own rendering of the syntax tree, since ``ast.dump`` and byte code differ between
Python versions. It is the same under CPython 3.10 to 3.13.
"""

import ast
import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Fields that say how a node is used or spelled, or that only some Python versions have.
_SILENT_FIELDS = {"ctx", "kind", "type_comment", "type_params"}


def parse_function(source: str) -> FunctionNode:
    """Parse the lines of one function, indented or not.

    Args:
        source: The function's lines, decorators included.

    Returns:
        The definition's syntax tree.

    Raises:
        SyntaxError: The text is not one function definition (a lambda inside a larger expression, for example).
    """
    # A block around an indented method: dedenting the text would change strings that span lines.
    body = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source).body
    node = body[0].body[0] if isinstance(body[0], ast.If) else body[0]
    if not isinstance(node, FunctionNode):
        raise SyntaxError("not a function definition")
    return node


def normalise(node: FunctionNode) -> FunctionNode:
    """Return a copy without docstrings, annotations and whatever else changes no behaviour."""
    stripped = _Strip().visit(copy.deepcopy(node))
    assert isinstance(stripped, FunctionNode)
    return stripped


def fingerprint(nodes: Iterable[FunctionNode]) -> str:
    """Return the twelve hexadecimal digits that stand for what the definitions do.

    Args:
        nodes: One function, or the getter and setter of a property.
    """
    text = "".join(piece for node in nodes for piece in _render(normalise(node)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def wrappers(node: FunctionNode) -> int:
    """Count the decorators that put another function around this one."""
    plain = {"classmethod", "deleter", "getter", "overload", "override", "property", "setter", "staticmethod"}
    return sum(decorator_name(decorator) not in plain for decorator in node.decorator_list)


def decorator_name(decorator: ast.expr) -> str:
    """Return ``c`` of ``@a.b.c`` and of ``@a.b.c(...)``."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


class _Strip(ast.NodeTransformer):
    """Removes what changes no behaviour."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self._function(node)

    def _function(self, node: FunctionNode) -> FunctionNode:
        node.returns = None
        node.decorator_list = [d for d in node.decorator_list if decorator_name(d) != "override"]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> Any:
        return None


def _render(value: object) -> Iterator[str]:
    """Yield the pieces of a rendering that does not depend on the Python version."""
    if isinstance(value, ast.AST):
        yield f"{type(value).__name__}("
        for field, child in ast.iter_fields(value):
            if field not in _SILENT_FIELDS and child is not None and child != []:
                yield f"{field}="
                yield from _render(child)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _render(item)
            yield ","
        yield "]"
    else:
        yield repr(value)
