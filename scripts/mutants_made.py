"""The mutants: a module's source, changed in one place at a time.

Owns what is changed, by mutmut's operators, and what is left alone. Knows no tests and no runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
from mutmut.mutation.mutators import mutation_operators, operator_string


@dataclass(frozen=True)
class Mutant:
    """One change: where, the line before and after it, and the whole source with it."""

    module: str
    function: str
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.module}\n{self.source}".encode()).hexdigest()[:16]


def mutants(module: str, source: str) -> list[Mutant]:
    """Every change that is made to a module, without those that make the same source."""
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    spans = wrapper.resolve(ByteSpanPositionProvider)
    content = source.encode()
    found: dict[str, Mutant] = {}
    for function, node, changed in _changes(wrapper.module):
        span = spans[node]
        start, end = span.start, span.start + span.length
        mended = wrapper.module.code_for_node(changed).strip()
        other = (content[:start] + mended.encode() + content[end:]).decode()
        if content[start:end].decode() != wrapper.module.code_for_node(node).strip() or other in found:
            other = wrapper.module.deep_replace(node, changed).code
        if other == source or other in found or not _compiles(other):
            continue
        before, after = _differing(source, other)
        line = content[:start].count(b"\n") + 1
        found[other] = Mutant(module, function, line, before, after, other)
    return list(found.values())


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _differing(source: str, other: str) -> tuple[str, str]:
    """The lines that differ, without indentation."""
    old, new = source.splitlines(), other.splitlines()
    same = [pair[0] == pair[1] for pair in zip(old, new, strict=False)]
    alike = [pair[0] == pair[1] for pair in zip(reversed(old), reversed(new), strict=False)]
    first, last = same.index(False), alike.index(False)
    before, after = (
        " ".join(each.strip() for each in lines[first : max(first + 1, len(lines) - last)]) for lines in (old, new)
    )
    return before, after


def _changes(tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """The function, a node and another in its place, for all of mutmut's operators.

    Left alone is what has no meaning at run time (annotations and their aliases, docstrings,
    protocols, overloads), decorators, and the words of messages. A string changes in one way, not three.
    """
    ignored = m.OneOf(
        m.Annotation(), m.Decorator(), m.FormattedString(), m.ConcatenatedString(), m.Import(), m.ImportFrom(),
        m.Assign(value=m.Subscript(value=m.Name("list") | m.Name("dict") | m.Name("Callable"))),
        m.If(test=m.Name("TYPE_CHECKING")),
        m.ClassDef(bases=[m.ZeroOrMore(), m.Arg(m.Name("Protocol")), m.ZeroOrMore()]),
        m.FunctionDef(decorators=[m.ZeroOrMore(), m.Decorator(m.Name("overload")), m.ZeroOrMore()]),
        m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.Ellipsis())]),
    )  # fmt: skip
    text = m.SimpleString()

    def walk(node: Any, function: str, raising: bool) -> Iterator[tuple[str, Any, Any]]:
        if m.matches(node, ignored) or (raising and m.matches(node, text)):
            return
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            function = f"{function}.{node.name.value}".lstrip(".")
        raising = raising or isinstance(node, cst.Raise)
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for number, changed in enumerate(operator(node)):
                    if operator is not operator_string or number == 0:
                        yield function, node, changed
        for child in node.children:
            yield from walk(child, function, raising)

    yield from walk(tree, "", False)
