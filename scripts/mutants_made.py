"""The mutants: a module's source, changed in one place at a time.

Owns what is changed, by mutmut's operators, and what is left alone. Knows no tests and no runs. mutmut's own
runner is not used: it leaves out whatever is decorated or outside of functions, such as properties and tables.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

# Left alone is what has no meaning at run time, decorators, and the words of messages.
LEFT_ALONE = m.OneOf(
    m.Annotation(), m.Decorator(), m.FormattedString(), m.ConcatenatedString(), m.Import(), m.ImportFrom(),
    m.Assign(value=m.Subscript(value=m.OneOf(*map(m.Name, ("list", "dict", "tuple", "Callable", "Literal"))))),
    m.Assign(value=m.Subscript(value=m.Attribute(value=m.Name("npt")))),
    m.If(test=m.Name("TYPE_CHECKING")),
    m.ClassDef(bases=[m.ZeroOrMore(), m.Arg(m.Name("Protocol")), m.ZeroOrMore()]),
    m.FunctionDef(decorators=[m.ZeroOrMore(), m.Decorator(m.Name("overload")), m.ZeroOrMore()]),
    m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.Ellipsis())]),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the lines of it, what it looks like, and the whole source with it."""

    module: str
    lines: range
    change: str  # the function, and the line with [[before -> after]] in the place of the words that differ
    source: str


def mutants(module: str, source: str, some: int | None = None) -> tuple[list[Mutant], int]:
    """So many of the changes that can be made to a module, drawn alike each time, or all; and how many there are."""
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    places, spans = wrapper.resolve(PositionProvider), wrapper.resolve(ByteSpanPositionProvider)
    changes = list(_changes(wrapper.module))
    random.Random(module).shuffle(changes)
    text, made = source.encode(), dict[str, Mutant]()
    for function, statement, node, changed in changes:
        if len(made) == some:
            break
        span, after = spans[node], wrapper.module.code_for_node(changed).strip()
        start, end = span.start, span.start + span.length
        other = (text[:start] + after.encode() + text[end:]).decode()
        if text[start:end].decode() != wrapper.module.code_for_node(node).strip():  # as where it has parentheses
            other = wrapper.module.deep_replace(node, changed).code
        if other != source and _compiles(other):
            lines = range(places[statement].start.line, places[node].end.line + 1)
            made.setdefault(other, Mutant(module, lines, f"{function}: {shown(source, other)}", other))
    return list(made.values()), len(changes)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def shown(source: str, other: str) -> str:
    """The line that differs, with ``[[before -> after]]`` in the place of the words that do."""
    start = _alike(source, other)
    while source[start - 1] not in " \n([{":
        start -= 1
    rest, changed = source[start:], other[start:]
    same = _alike(rest[::-1], changed[::-1])
    while same and rest[len(rest) - same] not in " \n,:)]}":
        same -= 1
    begin, end = source.rfind("\n", 0, start) + 1, source.find("\n", len(source) - same)
    words = f"[[{rest[: len(rest) - same]} -> {changed[: len(changed) - same]}]]"
    return " ".join(f"{source[begin:start]}{words}{source[len(source) - same : end]}".split())


def _alike(one: str, other: str) -> int:
    """How many characters two texts have in common at the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _changes(tree: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """The function, the statement, a node and another in its place, for all of mutmut's operators.

    A string changes in one way, not three.
    """

    def walk(node: Any, function: str, statement: Any, raising: bool) -> Iterator[tuple[str, Any, Any, Any]]:
        if m.matches(node, LEFT_ALONE) or (raising and isinstance(node, cst.SimpleString)):
            return
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            function = f"{function}.{node.name.value}".lstrip(".")
        if isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            statement = node
        raising = raising or isinstance(node, cst.Raise)
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for number, changed in enumerate(operator(node)):
                    if operator is not operator_string or number == 0:
                        yield function, statement, node, changed
        for child in node.children:
            yield from walk(child, function, statement, raising)

    yield from walk(tree, "", tree, False)
