"""What could be wrong in a module: copies of it with a single fault each, for tests to notice.

The faults are those of code whose work is to refuse: a check that is never made or always fails,
one of its conditions left out, a limit off by one, a call or a refusal that was forgotten, a loop
over nothing, another sign or another operator. Texts are left alone, and so is whatever says
nothing when the program runs: annotations, decorators, assertions for the type checker.

Published mutation testers have no such thing as a statement or a condition that is missing, which
is how checks are lost.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
_BOUNDS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FUNCTIONS = {"all": "any", "any": "all", "max": "min", "min": "max"}
_NO_MATTER = {"daemon", "strict"}
"""Arguments that change nothing unless something else is wrong."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in the function ``where``, ``was`` became ``now``; the ``nth`` that reads so.

    Lines and columns are no part of what it is called, so that a name outlives edits elsewhere.
    ``span``: the bytes of the source that ``now`` takes the place of.
    """

    where: str
    was: str
    now: str
    nth: int
    span: tuple[int, int]

    @property
    def name(self) -> tuple[str, str, str, int]:
        """What it is known by."""
        return self.where, self.was, self.now, self.nth

    def applied(self, source: bytes) -> bytes:
        """The module with the fault."""
        start, stop = self.span
        return source[:start] + self.now.encode() + source[stop:]


def mutants(source: bytes) -> list[Mutant]:
    """All faults of a module's source, in its order."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for one in sorted(finder.found, key=lambda mutant: mutant.span):
        found.append(replace(one, nth=seen[one.name[:3]]))
        seen[one.name[:3]] += 1
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._lines = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
        self._scope: list[str] = []

    def _add(self, node: ast.expr | ast.stmt, now: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        stop = self._lines[node.end_lineno - 1] + node.end_col_offset
        was = " ".join(ast.unparse(node).split())
        self.found.append(Mutant(".".join(self._scope), was, now, 0, (start, stop)))

    # Where faults are looked for.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scope.append(node.name)
        given = [default for default in node.args.kw_defaults if default is not None]
        self._visit_all([*node.args.defaults, *given, *node.body])
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._visit_all(node.body)
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """It tells the type checker what is so."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _NO_MATTER:
            self.visit(node.value)

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # Statements.

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self._decide(node.test)
        alone = len(node.body) == 1 and not node.orelse
        for statement in node.body:
            # Left out alone it is the same fault as a test that never holds.
            self._inside(statement) if alone else self.visit(statement)
        self._visit_all(node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self._add(node.iter, "()")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "pass")
        self._inside(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass")

    def _inside(self, statement: ast.stmt) -> None:
        """The faults of a statement that is there."""
        if isinstance(statement, ast.Raise):
            return  # in what it says
        if isinstance(statement, ast.Expr):
            self.generic_visit(statement)
        else:
            self.visit(statement)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if other := _SWAPPED.get(type(node.op)):
            changed = ast.AugAssign(node.target, _operator(other), node.value)
            self._add(node, ast.unparse(changed))
        self.generic_visit(node)

    # Expressions.

    def _decide(self, test: ast.expr) -> None:
        """A test that always goes one way, and the faults within it but the one that turns it
        round, which both of those are in part."""
        self._add(test, "False")
        self._add(test, "True")
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        if isinstance(test, ast.Compare) and not isinstance(test.ops[0], _BOUNDS):
            self.generic_visit(test)
        else:
            self.visit(test)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._decide(node.test)
        self._visit_all([node.body, node.orelse])

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self._add(test, "True")
            self.visit(test)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left_out in range(len(node.values)):
            rest = [value for n, value in enumerate(node.values) if n != left_out]
            kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            self._add(node, f"({ast.unparse(kept)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            others = [*node.ops]
            others[at] = _operator(_SWAPPED[type(operator)])
            changed = ast.Compare(node.left, others, node.comparators)
            self._add(node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if self._scope and (other := _SWAPPED.get(type(node.op))):  # outside there are types
            self._add(node, f"({ast.unparse(ast.BinOp(node.left, _operator(other), node.right))})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            self._add(node.func, _FUNCTIONS[node.func.id])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1))


def _operator(kind: type[ast.AST]) -> ast.AST:
    return kind()


def sampled(found: Sequence[Mutant], count: int, seed: int) -> Iterator[Mutant]:
    """``count`` of them. Which ones does not depend on the others that there are."""

    def drawn(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    chosen = {mutant.name for mutant in sorted(found, key=drawn)[:count]}
    return (mutant for mutant in found if mutant.name in chosen)
