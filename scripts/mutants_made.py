"""The mutants: a module's functions, changed in one place at a time.

Owns what is changed, by mutmut's operators, and what is left alone. Knows no tests and no runs. mutmut's own
runner is not used: it leaves out whatever is decorated, such as properties and context managers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

# Left alone is what has no meaning at run time, what runs on import, and the words of messages.
LEFT_ALONE = m.OneOf(
    m.Annotation(), m.Parameters(), m.Decorator(), m.FormattedString(), m.ConcatenatedString(),
    m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.Ellipsis())]),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: of which function, at which lines, what it looks like, and the function's code with it."""

    module: str
    function: str
    lines: range
    change: str  # the function, and the line with [[before -> after]] in the place of the words that differ
    code: CodeType
    key: str  # the same for the same change of the same source


def mutants(module: str, path: Path, some: int | None = None) -> tuple[list[Mutant], int]:
    """So many of the changes that can be made to a module, drawn alike each time, or all; and how many there are."""
    source = path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    places, spans = wrapper.resolve(PositionProvider), wrapper.resolve(ByteSpanPositionProvider)
    text, originals = source.encode(), functions(source, path)
    changes = list(_changes(wrapper.module))
    random.Random(module).shuffle(changes)
    made: dict[str, Mutant] = {}
    for function, statement, node, changed in changes:
        if len(made) == some:
            break
        start, end = spans[node].start, spans[node].start + spans[node].length
        before, after = (wrapper.module.code_for_node(each).strip() for each in (node, changed))
        if text[start:end].decode() == before:
            other = (text[:start] + after.encode() + text[end:]).decode()
        else:  # it has parentheses, say, which are not of its place; this takes long
            other = wrapper.module.deep_replace(node, changed).code
        code, original = functions(other, path).get(function), originals[function]
        if code and code != original and code.co_freevars == original.co_freevars:
            lines = range(places[statement].start.line, places[node].end.line + 1)
            change, key = (
                f"{function}: {shown(source, other)}",
                hashlib.sha256(f"{module}\n{other}".encode()).hexdigest(),
            )
            made.setdefault(other, Mutant(module, function, lines, change, code, key[:16]))
    return list(made.values()), len(changes)


def functions(source: str, path: Path) -> dict[str, CodeType]:
    """The code of each function that is in no other, by its name; none of what is no Python."""
    try:
        todo = [compile(source, path, "exec", dont_inherit=True)]
    except SyntaxError:
        return {}
    found: dict[str, CodeType] = {}
    while todo:
        for each in todo.pop().co_consts:
            if isinstance(each, CodeType) and "<locals>" not in each.co_qualname:
                found[each.co_qualname] = each
                todo.append(each)
    return found


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

    A function within another is a part of that. A string changes in one way, not three.
    """

    def walk(node: Any, name: str, statement: Any, inside: bool, raising: bool) -> Iterator[tuple[str, Any, Any, Any]]:
        if m.matches(node, LEFT_ALONE) or (raising and isinstance(node, cst.SimpleString)):
            return
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)) and not inside:
            name, inside = f"{name}.{node.name.value}".lstrip("."), isinstance(node, cst.FunctionDef)
        if isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            statement = node
        raising = raising or isinstance(node, cst.Raise)
        for kind, operator in mutation_operators if inside else ():
            if isinstance(node, kind):
                for number, changed in enumerate(operator(node)):
                    if operator is not operator_string or number == 0:
                        yield name, statement, node, changed
        for child in node.children:
            yield from walk(child, name, statement, inside, raising)

    yield from walk(tree, "", tree, False, False)
