"""Prompt programs: a Python function becomes a schema (Prompt Cache, §3.2.4).

The body of a function under :func:`schema` is translated, never run::

    @schema
    def trip(duration: Annotated[str, MaxTokens(5)], abroad: bool, question: str):
        with system:
            yield "You are a travel planner."
        with user:
            yield f"Plan a trip of {duration}.\\n"
            if abroad:
                yield "I have a passport.\\n"
        with user:
            yield question

============================  ===========================================================================
``yield "text"``              text
``{x}`` in an f-string        a parameter; ``x: Annotated[str, MaxTokens(5)]`` gives its length
``if``                        a module, imported if the condition holds
``if … else``, ``match``      a union of modules
``yield other(…)``            a module; ``other`` is a program as well
``for x in CONSTANT``         unrolled
``with user:``                the role of a chat template
``with scaffold:``            its modules are also encoded together, for prompts that import all of them
``x: str``, without length    text that is not cached; everything from there on is not cached either
============================  ===========================================================================

Expressions without parameters are evaluated once, when the schema is made. Conditions are evaluated when the
program is called: ``trip("3 days", True, "Where?")`` is the markup of a prompt. Everything else is a
:class:`SchemaError` that names the line.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from types import CodeType
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints
from xml.sax.saxutils import escape, quoteattr

from blendrag.errors import InvalidInputError, SchemaError
from blendrag.schema.markup import MAX_NAME_CHARS, MAX_TOKENS, RESERVED, ProgramMarkup, is_name
from blendrag.schema.nodes import (
    ROLES,
    Location,
    Module,
    Node,
    Parameter,
    Role,
    Scaffold,
    Schema,
    Text,
    Union,
    joined_texts,
)
from blendrag.wording import quoted

#: Passes through all loops of one program.
MAX_UNROLLED = 100_000
#: Scaffolds of one ``with scaffold:``, which makes one for each choice of its branches.
MAX_SCAFFOLDS = 100
_NAME_CHARS = 60
_CHOSEN = "_chosen_case"
_NOT_XML = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class MaxTokens:
    """In an annotation, the largest number of tokens of a parameter: ``Annotated[str, MaxTokens(5)]``."""

    tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or not 0 < self.tokens <= MAX_TOKENS:
            raise InvalidInputError(
                f"MaxTokens({self.tokens!r:.40}), expected a number of tokens from 1 to {MAX_TOKENS:,}"
            )


class RoleBlock:
    """``with user:`` or ``with scaffold:``."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


system, user, assistant = map(RoleBlock, ROLES)
scaffold = RoleBlock("scaffold")


class Program:
    """A function that was translated. Call it with values for the markup of a prompt."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.source = _Source(function)
        self._root = _Translator(self.source).root()
        self.markup = self._root.markup()
        """The schema in the markup language."""
        self.schema = self._root.schema(self.source.at(self.source.tree))

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """The markup of the prompt for these values. Raises :class:`InvalidInputError`."""
        try:
            bound = self.source.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidInputError(
                f"{self.source.name}{self.source.signature} cannot be called with these values: {exc}"
            ) from exc
        bound.apply_defaults()
        caller = sys._getframe(1)
        at = Location(caller.f_code.co_filename, caller.f_lineno)
        return ProgramMarkup.of(self._root.prompt(bound.arguments), at)


def schema(function: Callable[..., Any]) -> Program:
    """Translate ``function`` into a schema. Raises :class:`SchemaError` for what cannot be translated."""
    return Program(function)


# -- the function ---------------------------------------------------------------------------------


class _Source:
    """A function's syntax tree, parameters and the names it can see."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.isfunction(function):
            raise InvalidInputError(f"{function!r:.60} is no function; write @schema above a def")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInputError(
                f"{function.__name__}() is async; write @schema above a plain def"
            )
        self.name = function.__name__
        self.file = function.__code__.co_filename
        self.tree = self._definition(function)
        if not is_name(self.name):
            raise SchemaError(
                self.at(self.tree),
                f"the name {quoted(self.name)} cannot be a name in XML, expected another, of at most "
                f"{MAX_NAME_CHARS} characters",
            )
        has_docstring = ast.get_docstring(self.tree, clean=False) is not None
        self.body = self.tree.body[has_docstring:]
        for part in ast.walk(self.tree):
            if isinstance(part, ast.NamedExpr):
                raise SchemaError(self.at(part), f"{ast.unparse(part)!r:.80} is not translated")
        self.signature = inspect.signature(function)
        self.names = {**function.__globals__, **_closure(function)}
        try:
            hints = get_type_hints(function, localns=self.names, include_extras=True)
        except Exception as exc:  # whatever evaluating an annotation raises
            raise SchemaError(
                self.at(self.tree), f"an annotation cannot be evaluated: {exc}"
            ) from exc
        self.max_tokens: dict[str, int | None] = {}
        """The limit of each parameter; ``None`` without :class:`MaxTokens`."""
        self.unbounded: set[str] = set()
        """Parameters that are ``str`` and have no length."""
        for name, parameter in self.signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise SchemaError(
                    self.at(self.tree), f"*{name} is not translated, expected named parameters"
                )
            self.max_tokens[name] = _max_tokens(hints.get(name))
            if hints.get(name, str) is str:
                self.unbounded.add(name)

    def _definition(self, function: Callable[..., Any]) -> ast.FunctionDef:
        code = function.__code__
        try:
            lines, _ = inspect.findsource(function)
            tree = ast.parse("".join(lines))
        except (OSError, SyntaxError) as exc:
            raise InvalidInputError(
                f"the source of {self.name}() is not available ({exc}); define it in a file"
            ) from exc
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
        raise InvalidInputError(
            f"{self.name}() is not in {self.file} as it was imported; import it again"
        )

    def at(self, node: ast.AST) -> Location:
        return Location(self.file, node.lineno, node.col_offset + 1)  # type: ignore[attr-defined]


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables of the functions around ``function`` that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # no value yet
            found[name] = cell.cell_contents
    return found


def _max_tokens(hint: Any) -> int | None:
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra.tokens for extra in extras if isinstance(extra, MaxTokens)), None)


# -- what a program consists of -------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """A parameter of the markup, and the expression for its argument."""

    name: str
    max_tokens: int
    value: Callable[[Mapping[str, Any]], str]
    at: Location

    def markup(self) -> str:
        return f'<param name="{self.name}" len="{self.max_tokens}"/>'


@dataclass(frozen=True)
class _RoleOf:
    role: str
    items: Sequence[_Item]

    def markup(self) -> str:
        return f"<{self.role}>{_markup(self.items)}</{self.role}>"


@dataclass(frozen=True)
class _ModuleOf:
    """A branch, or a call with the values of its parameters."""

    name: str
    items: Sequence[_Item]
    at: Location
    values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def markup(self) -> str:
        return f'<module name="{self.name}">{_markup(self.items)}</module>'

    def imported(self, values: Mapping[str, Any]) -> str:
        values = self.values(values)
        arguments = "".join(
            f" {slot.name}={quoteattr(slot.value(values))}" for slot in _slots(self.items)
        )
        inner = _imports(self.items, values)
        return f"<{self.name}{arguments}>{inner}</{self.name}>"


@dataclass(frozen=True)
class _Choice:
    """Branches of which one is taken, or none; a branch without text is ``None``."""

    branches: Sequence[_ModuleOf | None]
    choose: Callable[[Mapping[str, Any]], int | None]

    def markup(self) -> str:
        members = [branch.markup() for branch in self.branches if branch]
        return f"<union>{''.join(members)}</union>" if len(members) > 1 else "".join(members)

    def imported(self, values: Mapping[str, Any]) -> str:
        chosen = self.choose(values)
        branch = None if chosen is None else self.branches[chosen]
        return branch.imported(values) if branch else ""


_Item: TypeAlias = str | _Slot | _RoleOf | _ModuleOf | _Choice


def _markup(items: Iterable[_Item]) -> str:
    return "".join(_escaped(item) if isinstance(item, str) else item.markup() for item in items)


def _imports(items: Iterable[_Item], values: Mapping[str, Any]) -> str:
    found = []
    for item in items:
        if isinstance(item, _ModuleOf | _Choice):
            found.append(item.imported(values))
        elif isinstance(item, _RoleOf):
            found.append(_imports(item.items, values))
    return "".join(found)


def _nodes(items: Iterable[_Item], at: Location) -> tuple[Any, ...]:
    """What parsing the markup gives, with places in the program; a text has that of its module."""
    nodes: list[Node] = []
    for item in items:
        match item:
            case str():
                nodes.append(Text(item, at))
            case _Slot():
                nodes.append(Parameter(item.name, item.max_tokens, item.at))
            case _RoleOf():
                nodes.append(Role(item.role, _nodes(item.items, at), at))
            case _ModuleOf():
                nodes.append(Module(item.name, _nodes(item.items, item.at), item.at))
            case _Choice():
                members = _nodes(filter(None, item.branches), at)
                nodes.append(Union(members, at) if len(members) > 1 else members[0])
    return joined_texts(nodes)


def _slots(items: Iterable[_Item]) -> Iterator[_Slot]:
    for item in items:
        if isinstance(item, _Slot):
            yield item
        elif isinstance(item, _RoleOf):
            yield from _slots(item.items)


def _escaped(text: str) -> str:
    return escape(text, {"\r": "&#13;"})


@dataclass(frozen=True)
class _Uncached:
    """Text at the end of a prompt; in a role if ``role`` is not empty."""

    role: str
    values: Sequence[Callable[[Mapping[str, Any]], str]]

    def markup(self, values: Mapping[str, Any]) -> str:
        text = _escaped("".join(value(values) for value in self.values))
        return f"<{self.role}>{text}</{self.role}>" if self.role else text


@dataclass(frozen=True)
class _Root:
    name: str
    items: Sequence[_Item]
    scaffolds: Sequence[Sequence[str]]
    uncached: Sequence[_Uncached]

    def markup(self) -> str:
        inner = _markup(self.items)
        inner += "".join(f'<scaffold modules="{" ".join(names)}"/>' for names in self.scaffolds)
        return f'<schema name="{self.name}" xml:space="preserve">{inner}</schema>'

    def schema(self, at: Location) -> Schema:
        scaffolds = (Scaffold(tuple(names), at) for names in self.scaffolds)
        return Schema(self.name, _nodes(self.items, at), tuple(scaffolds), at)

    def prompt(self, values: Mapping[str, Any]) -> str:
        inner = _imports(self.items, values)
        inner += "".join(text.markup(values) for text in self.uncached)
        return f'<prompt schema="{self.name}" xml:space="preserve">{inner}</prompt>'


# -- translation ----------------------------------------------------------------------------------


@dataclass
class _Collected:
    """What all functions of one program share."""

    names: set[str] = field(default_factory=lambda: set(RESERVED))
    """Names of modules, which are unique in it."""
    passes: int = 0
    scaffolds: list[Sequence[str]] = field(default_factory=list)

    def unique(self, slug: str) -> str:
        name, number = slug, 1
        while name in self.names:
            number += 1
            name = f"{slug}-{number}"
        self.names.add(name)
        return name


@dataclass(frozen=True)
class _Translator:
    """Statements of one function → items, in one pass of its loops."""

    source: _Source
    collected: _Collected = field(default_factory=_Collected)
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Loop variables, and parameters whose argument is a constant."""
    in_role: bool = False

    def root(self) -> _Root:
        source, name = self.source, self.collected.unique(self.source.name)
        cut = next((i for i, each in enumerate(source.body) if self._is_uncached(each)), None)
        items = self._items(source.body[:cut])
        if next(_slots(items), None):  # parameters are inside of modules
            items = [self._module(name, items, source.at(source.tree))]
        if not items:
            raise SchemaError(
                source.at(source.tree),
                f"{source.name}() has no text to cache, expected yield with text",
            )
        rest = source.body[cut:] if cut is not None else []
        return _Root(source.name, items, self.collected.scaffolds, [*self._uncached(rest, "")])

    def _items(self, body: Sequence[ast.stmt]) -> list[_Item]:
        return [item for each in body for item in self._statement(each) if item]

    def _statement(self, node: ast.stmt) -> Iterable[_Item]:
        match node:
            case ast.Pass():
                return ()
            case ast.Expr(ast.Yield(ast.Call() as call)) if callee := self._callee(call):
                return self._call(call, callee.source)
            case ast.Expr(ast.Yield(ast.expr() as value)):
                return self._text(value)
            case ast.If():
                return self._if(node)
            case ast.Match():
                return self._match(node)
            case ast.For(orelse=[]):
                return self._for(node)
            case ast.With(items=[ast.withitem(expression, None)]):
                role = self._tag(expression)
                if role == scaffold.tag:
                    return self._scaffold(node)
                if self.in_role:
                    raise self._error(node, "is inside a role, expected outside")
                return [_RoleOf(role, replace(self, in_role=True)._items(node.body))]
            case ast.Expr(ast.Constant(str())):
                raise self._error(node, "does nothing; write yield before the text")
        raise self._error(node, "is not translated, expected yield, if, match, for or with")

    def _error(self, node: ast.AST, wrong: str) -> SchemaError:
        first = ast.unparse(node).split("\n")[0]
        return SchemaError(self.source.at(node), f"{first[:80]!r} {wrong}")

    # -- expressions

    def _parameters_in(self, node: ast.AST) -> list[str]:
        """The parameters that ``node`` depends on."""
        own = self.source.max_tokens.keys() - self.constants.keys()
        return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in own]

    def _compiled(self, node: ast.expr) -> CodeType:
        return compile(ast.Expression(node), self.source.file, "eval")

    def _constant(self, node: ast.expr) -> Any:
        return self._evaluate(self._compiled(node), {}, self.source.at(node))

    def _evaluate(self, code: CodeType, values: Mapping[str, Any], at: Location) -> Any:
        names = self._namespace(values)
        try:
            value = eval(code, names)
        except Exception as exc:  # whatever the expression raises
            raise SchemaError(at, f"this cannot be evaluated: {type(exc).__name__}: {exc}") from exc
        return names.get(_CHOSEN, value)

    def _namespace(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.source.names, **values, **self.constants}

    # -- text

    def _text(self, node: ast.expr) -> Iterator[_Item]:
        if not self._parameters_in(node):
            yield self._checked(node, self._constant(node))
        elif isinstance(node, ast.JoinedStr):
            for value in node.values:
                alone = ast.copy_location(ast.JoinedStr([value]), value)
                if self._parameters_in(value):
                    yield self._slot(alone)
                else:
                    yield self._checked(node, self._constant(alone))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from self._text(node.left)
            yield from self._text(node.right)
        else:
            yield self._slot(node)

    def _checked(self, node: ast.AST, text: Any) -> str:
        if not isinstance(text, str):
            raise self._error(node, f"is {text!r:.40}, expected a str; write an f-string")
        if wrong := _NOT_XML.search(text):
            raise self._error(node, f"holds {wrong[0]!r}, which XML cannot hold; leave it out")
        return text

    def _slot(self, node: ast.expr) -> _Slot:
        self._refuse_choice(node)
        names = sorted(set(self._parameters_in(node)))
        for name in names:
            if self.source.max_tokens[name] is None:
                raise self._error(
                    node,
                    f"uses parameter {name!r}, whose length is unknown; expected {name}: Annotated[str, "
                    "MaxTokens(n)], or its text at the end of the program",
                )
        if len(names) > 1:
            raise self._error(node, f"uses {' and '.join(names)}, expected one parameter")
        [name] = names
        max_tokens = self.source.max_tokens[name]
        assert max_tokens is not None
        if not is_name(name):
            raise self._error(node, "has a name that XML cannot have, expected another")
        return _Slot(name, max_tokens, self._value(node), self.source.at(node))

    def _value(self, node: ast.expr) -> Callable[[Mapping[str, Any]], str]:
        code, at = self._compiled(node), self.source.at(node)
        return lambda values: self._checked(node, self._evaluate(code, values, at))

    def _refuse_choice(self, node: ast.expr) -> None:
        if isinstance(node, ast.IfExp):
            raise self._error(node, "is not translated, expected an if statement")

    # -- calls and roles

    def _module(
        self,
        name: str,
        items: Sequence[_Item],
        at: Location,
        values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> _ModuleOf:
        return _ModuleOf(name, _numbered(items, Counter()), at, values)

    def _callee(self, call: ast.Call) -> Program | None:
        callee = None if self._parameters_in(call.func) else self._constant(call.func)
        return callee if isinstance(callee, Program) else None

    def _call(self, call: ast.Call, source: _Source) -> list[_Item]:
        keywords = {each.arg: each.value for each in call.keywords}
        if None in keywords or any(isinstance(arg, ast.Starred) for arg in call.args):
            raise self._error(call, "has * or **, expected arguments one by one")
        try:
            bound = source.signature.bind(*call.args, **keywords)  # type: ignore[arg-type]
        except TypeError as exc:
            signature = f"{source.name}{source.signature}"
            raise self._error(call, f"does not fit {signature}: {exc}") from exc
        constants: dict[str, Any] = {
            name: parameter.default
            for name, parameter in source.signature.parameters.items()
            if name not in bound.arguments
        }
        given: dict[str, tuple[CodeType, Location]] = {}
        for name, argument in bound.arguments.items():
            if self._parameters_in(argument):
                given[name] = self._compiled(argument), self.source.at(argument)
            else:
                constants[name] = self._constant(argument)

        def values(outer: Mapping[str, Any]) -> dict[str, Any]:
            return {name: self._evaluate(code, outer, at) for name, (code, at) in given.items()}

        name = self.collected.unique(source.name)
        callee = replace(self, source=source, constants=constants)
        items = callee._items(source.body)
        return [self._module(name, items, self.source.at(call), values)] if items else []

    def _tag(self, node: ast.expr) -> str:
        block = None if self._parameters_in(node) else self._constant(node)
        if not isinstance(block, RoleBlock):
            raise self._error(
                node, "after with is not translated, expected system, user, assistant or scaffold"
            )
        return block.tag

    def _scaffold(self, node: ast.With) -> list[_Item]:
        items = self._items(node.body)
        if _has_text(items):
            raise self._error(
                node, "holds text, expected only if, match, for and calls of programs"
            )
        choices = list(islice(_scaffolds(items), MAX_SCAFFOLDS + 1))
        if any(len(names) < 2 for names in choices):
            raise self._error(
                node, "holds fewer than two modules, expected some to encode together"
            )
        if len(choices) > MAX_SCAFFOLDS:
            raise self._error(
                node, f"has more than {MAX_SCAFFOLDS} combinations of branches, expected fewer"
            )
        self.collected.scaffolds += choices
        return items

    # -- branches and loops

    def _if(self, node: ast.If) -> list[_Item]:
        branches: list[_ModuleOf | None] = []
        tests: list[tuple[CodeType | None, Location]] = []
        first = ""
        for test, body in _chain(node):
            if test is not None and not self._parameters_in(test):
                if not self._constant(test):
                    continue
                test = None
            if test is None and not branches:
                return self._items(body)
            slug = _slugged(self._written(test)) if test is not None else f"{first}-else"
            first = first or slug
            at = self.source.at(body[0] if test is None else test)
            branches.append(self._branch(slug, body, at))
            tests.append((None if test is None else self._compiled(test), at))
            if test is None:
                break

        def choose(values: Mapping[str, Any]) -> int | None:
            for i, (code, at) in enumerate(tests):
                if code is None or self._evaluate(code, values, at):
                    return i
            return None

        return [_Choice(branches, choose)] if any(branches) else []

    def _match(self, node: ast.Match) -> list[_Item]:
        for part in (part for case in node.cases for part in ast.walk(case.pattern)):
            name = getattr(part, "rest", None) or getattr(part, "name", None)
            if isinstance(part, ast.pattern) and name:
                raise self._error(
                    part, f"binds {name!r}, which is not translated, expected a value or _"
                )
        at = self.source.at(node)
        cases = [
            ast.match_case(case.pattern, case.guard, [_assignment(_CHOSEN, i)])
            for i, case in enumerate(node.cases)
        ]
        chooser = ast.Module([_assignment(_CHOSEN, None), ast.Match(node.subject, cases)], [])
        code = compile(ast.fix_missing_locations(chooser), self.source.file, "exec")
        decisive = filter(None, (part for case in cases for part in (case.pattern, case.guard)))
        if not any(map(self._parameters_in, (node.subject, *decisive))):
            chosen = self._evaluate(code, {}, at)
            return [] if chosen is None else self._items(node.cases[chosen].body)
        branches = []
        for case in node.cases:
            pattern = ast.unparse(case.pattern)
            pattern = "else" if pattern == "_" else pattern
            slug = _slugged(f"{self._written(node.subject)} {pattern}")
            branches.append(self._branch(slug, case.body, self.source.at(case.pattern)))
        choose = functools.partial(self._evaluate, code, at=at)
        return [_Choice(branches, choose)] if any(branches) else []

    def _branch(self, slug: str, body: Sequence[ast.stmt], at: Location) -> _ModuleOf | None:
        name = self.collected.unique(slug)
        items = self._items(body)
        return self._module(name, items, at) if items else None

    def _written(self, node: ast.expr) -> str:
        """The source of an expression, with the values of loop variables."""
        constants = self.constants

        class Constants(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.AST:
                value = constants.get(name.id)
                return ast.Constant(value) if isinstance(value, str | int) else name

        return ast.unparse(Constants().visit(ast.parse(ast.unparse(node), mode="eval")))

    def _for(self, node: ast.For) -> Iterator[_Item]:
        if parameters := self._parameters_in(node.iter):
            raise self._error(
                node,
                f"depends on {parameters[0]!r}, expected a loop over constants, as loops are unrolled when "
                "the schema is made",
            )
        targets = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        for part in ast.walk(node.target):
            if isinstance(part, ast.Attribute | ast.Subscript):
                raise self._error(part, "is no loop variable, expected a name")
        if shadowed := sorted(targets & {*self.source.max_tokens, *self.constants}):
            raise self._error(
                node, f"assigns {shadowed[0]!r}, which has a value already, expected another name"
            )
        assign = ast.Module([ast.Assign([node.target], ast.Name("_value", ast.Load()))], [])
        code = compile(ast.fix_missing_locations(assign), self.source.file, "exec")
        try:
            values = iter(self._constant(node.iter))
        except TypeError as exc:
            raise self._error(node.iter, f"is no iterable: {exc}") from exc
        for value in values:
            self.collected.passes += 1
            if self.collected.passes > MAX_UNROLLED:
                raise self._error(node, f"makes more than {MAX_UNROLLED:,} passes, expected fewer")
            names = self._namespace({"_value": value})
            try:
                exec(code, names)
            except Exception as exc:  # a value that cannot be unpacked
                wrong = f"{value!r:.40} cannot be unpacked: {exc}"
                raise SchemaError(self.source.at(node), wrong) from exc
            inner = {**self.constants, **{name: names[name] for name in targets}}
            yield from replace(self, constants=inner)._items(node.body)

    # -- the end of a prompt, which is not cached

    def _written_text(self, node: ast.stmt) -> ast.expr | None:
        """What ``yield`` writes, unless it calls a program."""
        match node:
            case ast.Expr(ast.Yield(ast.Call() as call)) if self._callee(call):
                return None
            case ast.Expr(ast.Yield(ast.expr() as value)):
                return value
        return None

    def _is_uncached(self, node: ast.stmt) -> bool:
        """Whether a statement outside of branches writes a parameter without length."""
        texts = map(self._written_text, node.body if isinstance(node, ast.With) else [node])
        return any(
            name in self.source.unbounded
            for text in filter(None, texts)
            for name in self._parameters_in(text)
        )

    def _uncached(self, body: Sequence[ast.stmt], role: str) -> Iterator[_Uncached]:
        for node in body:
            if (text := self._written_text(node)) is not None:
                self._refuse_choice(text)
                yield _Uncached(role, [self._value(text)])
                continue
            match node:
                case ast.With(items=[ast.withitem(expression, None)]) if not role:
                    tag = self._tag(expression)
                    if tag == scaffold.tag:
                        raise self._error(node, "holds text that is not cached, expected modules")
                    parts = self._uncached(node.body, tag)
                    yield _Uncached(tag, [value for part in parts for value in part.values])
                case _:
                    raise self._error(
                        node, "follows text whose length is unknown, expected only yield with text"
                    )


def _has_text(items: Iterable[_Item]) -> bool:
    return any(
        _has_text(item.items) if isinstance(item, _RoleOf) else isinstance(item, str | _Slot)
        for item in items
    )


def _scaffolds(items: Iterable[_Item]) -> Iterator[tuple[str, ...]]:
    """For each choice of branches, the outermost modules that have text."""
    options = [list(islice(_modules(item), MAX_SCAFFOLDS + 1)) for item in items]
    return (tuple(chain.from_iterable(names)) for names in product(*options))


def _modules(item: _Item) -> Iterator[tuple[str, ...]]:
    match item:
        case _ModuleOf() if _has_text(item.items):
            yield (item.name,)
        case _ModuleOf() | _RoleOf():
            yield from _scaffolds(item.items)
        case _Choice():
            for branch in filter(None, item.branches):
                yield from _modules(branch)
        case _:
            yield ()


def _numbered(items: Iterable[_Item], counts: Counter[str]) -> list[_Item]:
    """The items of a module with different names for its parameters: x, x-2, x-3."""
    numbered: list[_Item] = []
    for item in items:
        if isinstance(item, _RoleOf):
            item = replace(item, items=_numbered(item.items, counts))
        elif isinstance(item, _Slot):
            counts[item.name] += 1
            if counts[item.name] > 1:
                item = replace(item, name=f"{item.name}-{counts[item.name]}")
        numbered.append(item)
    return numbered


def _chain(node: ast.If) -> Iterator[tuple[ast.expr | None, list[ast.stmt]]]:
    """The conditions of ``if … elif … else`` with their bodies."""
    yield node.test, node.body
    match node.orelse:
        case [ast.If() as other]:
            yield from _chain(other)
        case [_, *_]:
            yield None, node.orelse


def _assignment(name: str, value: Any) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value))


def _slugged(text: str) -> str:
    """A name for a module: ``city == 'Rome'`` → ``city-Rome``."""
    slug = re.sub(r"\W+", "-", text)[:_NAME_CHARS].strip("-")
    if not slug:
        return "branch"
    slug = slug if is_name(slug) else f"if-{slug}"
    return slug if is_name(slug) else "branch"
