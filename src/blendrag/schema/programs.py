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
from blendrag.schema.markup import MAX_TOKENS, RESERVED, ProgramMarkup, is_name, parse_schema
from blendrag.schema.nodes import (
    ROLES,
    Location,
    Module,
    Node,
    Parameter,
    Role,
    Schema,
    Union,
)

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
        root = _Translator().root(self.source)
        self._root = root
        self.markup = root.markup()
        """The schema in the markup language."""
        places, at = dict(_places(root.items)), self.source.at(self.source.tree)
        parsed = parse_schema(ProgramMarkup.of(self.markup, at))
        self.schema: Schema = replace(parsed, children=_located(parsed.children, places, at))

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


@dataclass(frozen=True)
class _Scope:
    """What names mean in one function, in one pass of its loops."""

    source: _Source
    constants: Mapping[str, Any]
    """Loop variables, and parameters whose argument is a constant."""

    def with_constants(self, more: Mapping[str, Any]) -> _Scope:
        return _Scope(self.source, {**self.constants, **more})

    def parameters_in(self, node: ast.AST) -> list[str]:
        """The parameters that ``node`` depends on."""
        return [
            name.id
            for name in ast.walk(node)
            if isinstance(name, ast.Name)
            and name.id in self.source.max_tokens
            and name.id not in self.constants
        ]

    def constant(self, node: ast.expr) -> Any:
        return self.evaluate(_compiled(node, self.source), {}, self.source.at(node))

    def evaluate(self, code: CodeType, values: Mapping[str, Any], at: Location) -> Any:
        names = self.namespace(values)
        try:
            value = eval(code, names)
        except Exception as exc:  # whatever the expression raises
            raise SchemaError(at, f"this cannot be evaluated: {type(exc).__name__}: {exc}") from exc
        return names.get(_CHOSEN, value)

    def namespace(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.source.names, **values, **self.constants}


def _compiled(node: ast.expr, source: _Source) -> CodeType:
    return compile(ast.Expression(node), source.file, "eval")


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


def _places(
    items: Iterable[_Item | None], module: str = ""
) -> Iterator[tuple[tuple[str, ...], Location]]:
    """Where modules and their parameters are in the program."""
    for item in items:
        if isinstance(item, _Slot):
            yield (module, item.name), item.at
        elif isinstance(item, _RoleOf):
            yield from _places(item.items, module)
        elif isinstance(item, _Choice):
            yield from _places(item.branches)
        elif isinstance(item, _ModuleOf):
            yield (item.name,), item.at
            yield from _places(item.items, item.name)


def _located(
    nodes: Iterable[Node],
    places: Mapping[tuple[str, ...], Location],
    at: Location,
    module: str = "",
) -> tuple[Any, ...]:
    """The nodes with their places in the program; a text has that of its module."""

    def located(node: Node) -> Node:
        if isinstance(node, Parameter):
            return replace(node, at=places[module, node.name])
        if isinstance(node, Module):
            inner = places[node.name,]
            return replace(
                node, at=inner, children=_located(node.children, places, inner, node.name)
            )
        if isinstance(node, Union):
            return replace(node, at=at, members=_located(node.members, places, at, module))
        if isinstance(node, Role):
            return replace(node, at=at, children=_located(node.children, places, at, module))
        return replace(node, at=at)

    return tuple(map(located, nodes))


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
    value: Callable[[Mapping[str, Any]], str]

    def markup(self, values: Mapping[str, Any]) -> str:
        text = _escaped(self.value(values))
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

    def prompt(self, values: Mapping[str, Any]) -> str:
        inner = _imports(self.items, values)
        inner += "".join(text.markup(values) for text in self.uncached)
        return f'<prompt schema="{self.name}" xml:space="preserve">{inner}</prompt>'


# -- translation ----------------------------------------------------------------------------------


@dataclass
class _Translator:
    """Statements → items. Names of modules are unique in one program."""

    _used: set[str] = field(default_factory=lambda: set(RESERVED))
    _passes: int = 0
    _scaffolds: list[Sequence[str]] = field(default_factory=list)

    def root(self, source: _Source) -> _Root:
        scope, name = _Scope(source, {}), self._unique(source.name)
        body = _without_docstring(source.tree.body)
        cut = next((i for i, each in enumerate(body) if self._is_uncached(each, scope)), len(body))
        items = self._items(body[:cut], scope)
        if next(_slots(items), None):  # parameters are inside of modules
            items = [_ModuleOf(name, _numbered(items, Counter()), source.at(source.tree))]
        if not items:
            raise SchemaError(
                source.at(source.tree),
                f"{source.name}() has no text to cache, expected yield with text",
            )
        uncached = list(self._uncached(body[cut:], scope, ""))
        return _Root(source.name, items, self._scaffolds, uncached)

    def _items(self, body: Sequence[ast.stmt], scope: _Scope, in_role: bool = False) -> list[_Item]:
        items: list[_Item] = []
        for each in body:
            items += filter(None, self._statement(each, scope, in_role))
        return items

    def _statement(self, node: ast.stmt, scope: _Scope, in_role: bool) -> Iterable[_Item]:
        match node:
            case ast.Pass():
                return ()
            case ast.Expr(ast.Yield(ast.Call() as call)) if self._callee(call, scope):
                return self._call(call, scope, in_role)
            case ast.Expr(ast.Yield(ast.expr() as value)):
                return self._text(value, scope)
            case ast.If():
                return self._if(node, scope, in_role)
            case ast.Match():
                return self._match(node, scope, in_role)
            case ast.For(orelse=[]):
                return self._for(node, scope, in_role)
            case ast.With(items=[ast.withitem(expression, None)]):
                role = self._tag(expression, scope)
                if role == scaffold.tag:
                    return self._scaffold(node, scope, in_role)
                if in_role:
                    raise self._error(node, scope, "is inside a role, expected outside")
                return [_RoleOf(role, self._items(node.body, scope, in_role=True))]
            case ast.Expr(ast.Constant(str())):
                raise self._error(node, scope, "does nothing; write yield before the text")
        raise self._error(node, scope, "is not translated, expected yield, if, match, for or with")

    def _error(self, node: ast.AST, scope: _Scope, wrong: str) -> SchemaError:
        first = ast.unparse(node).split("\n")[0]
        return SchemaError(scope.source.at(node), f"{first[:80]!r} {wrong}")

    # -- text

    def _text(self, node: ast.expr, scope: _Scope) -> Iterator[_Item]:
        if not scope.parameters_in(node):
            yield self._checked(node, scope, scope.constant(node))
        elif isinstance(node, ast.JoinedStr):
            for value in node.values:
                alone = ast.copy_location(ast.JoinedStr([value]), value)
                if scope.parameters_in(value):
                    yield self._slot(alone, scope)
                else:
                    yield self._checked(node, scope, scope.constant(alone))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from self._text(node.left, scope)
            yield from self._text(node.right, scope)
        elif isinstance(node, ast.IfExp):
            raise self._error(node, scope, "is not translated, expected an if statement")
        else:
            yield self._slot(node, scope)

    def _checked(self, node: ast.AST, scope: _Scope, text: Any) -> str:
        if not isinstance(text, str):
            raise self._error(node, scope, f"is {text!r:.40}, expected a str; write an f-string")
        if wrong := _NOT_XML.search(text):
            raise self._error(
                node, scope, f"holds {wrong[0]!r}, which XML cannot hold; leave it out"
            )
        return text

    def _slot(self, node: ast.expr, scope: _Scope) -> _Slot:
        names = set(scope.parameters_in(node))
        for name in names:
            if scope.source.max_tokens[name] is None:
                raise self._error(
                    node,
                    scope,
                    f"uses parameter {name!r}, whose length is unknown; expected {name}: Annotated[str, "
                    "MaxTokens(n)], or its text at the end of the program",
                )
        if len(names) > 1:
            raise self._error(
                node, scope, f"uses {' and '.join(sorted(names))}, expected one parameter"
            )
        [name] = names
        max_tokens = scope.source.max_tokens[name]
        assert max_tokens is not None
        if not is_name(name):
            raise self._error(node, scope, "has a name that XML cannot have, expected another")
        return _Slot(name, max_tokens, self._value(node, scope), scope.source.at(node))

    def _value(self, node: ast.expr, scope: _Scope) -> Callable[[Mapping[str, Any]], str]:
        code, at = _compiled(node, scope.source), scope.source.at(node)
        return lambda values: self._checked(node, scope, scope.evaluate(code, values, at))

    # -- calls and roles

    def _callee(self, call: ast.Call, scope: _Scope) -> Program | None:
        if scope.parameters_in(call.func):
            return None
        callee = scope.constant(call.func)
        return callee if isinstance(callee, Program) else None

    def _call(self, call: ast.Call, scope: _Scope, in_role: bool) -> list[_Item]:
        callee = self._callee(call, scope)
        assert callee is not None
        source = callee.source
        if any(isinstance(arg, ast.Starred) for arg in call.args) or any(
            keyword.arg is None for keyword in call.keywords
        ):
            raise self._error(call, scope, "has * or **, expected arguments one by one")
        try:
            bound = source.signature.bind(
                *call.args, **{keyword.arg or "": keyword.value for keyword in call.keywords}
            )
        except TypeError as exc:
            raise self._error(
                call, scope, f"does not fit {source.name}{source.signature}: {exc}"
            ) from exc
        constants: dict[str, Any] = {
            name: parameter.default
            for name, parameter in source.signature.parameters.items()
            if name not in bound.arguments
        }
        given: dict[str, tuple[CodeType, Location]] = {}
        for name, argument in bound.arguments.items():
            if scope.parameters_in(argument):
                given[name] = _compiled(argument, scope.source), scope.source.at(argument)
            else:
                constants[name] = scope.constant(argument)

        def values(outer: Mapping[str, Any]) -> dict[str, Any]:
            return {name: scope.evaluate(code, outer, at) for name, (code, at) in given.items()}

        name = self._unique(source.name)
        body = _without_docstring(source.tree.body)
        items = self._items(body, _Scope(source, constants), in_role)
        if not items:
            return []
        return [_ModuleOf(name, _numbered(items, Counter()), scope.source.at(call), values)]

    def _tag(self, node: ast.expr, scope: _Scope) -> str:
        block = None if scope.parameters_in(node) else scope.constant(node)
        if not isinstance(block, RoleBlock):
            raise self._error(
                node,
                scope,
                "after with is not translated, expected system, user, assistant or scaffold",
            )
        return block.tag

    def _scaffold(self, node: ast.With, scope: _Scope, in_role: bool) -> list[_Item]:
        items = self._items(node.body, scope, in_role)
        if _has_text(items):
            raise self._error(
                node, scope, "holds text, expected only if, match, for and calls of programs"
            )
        choices: list[tuple[str, ...]] = []
        for names in _scaffolds(items):
            if len(names) < 2:
                raise self._error(
                    node, scope, "holds fewer than two modules, expected some to encode together"
                )
            choices.append(names)
            if len(choices) > MAX_SCAFFOLDS:
                raise self._error(
                    node,
                    scope,
                    f"has more than {MAX_SCAFFOLDS} combinations of branches, expected fewer",
                )
        self._scaffolds += choices
        return items

    # -- branches and loops

    def _if(self, node: ast.If, scope: _Scope, in_role: bool) -> list[_Item]:
        branches: list[_ModuleOf | None] = []
        tests: list[tuple[CodeType | None, Location]] = []
        first = ""
        for test, body in _chain(node):
            if test is not None and not scope.parameters_in(test):
                if not scope.constant(test):
                    continue
                test = None
            if test is None and not branches:
                return self._items(body, scope, in_role)
            slug = _slug(test, scope) if test is not None else f"{first}-else"
            first = first or slug
            at = scope.source.at(body[0] if test is None else test)
            branches.append(self._branch(slug, body, at, scope, in_role))
            tests.append((None if test is None else _compiled(test, scope.source), at))
            if test is None:
                break

        def choose(values: Mapping[str, Any]) -> int | None:
            for i, (code, at) in enumerate(tests):
                if code is None or scope.evaluate(code, values, at):
                    return i
            return None

        return [_Choice(branches, choose)] if any(branches) else []

    def _match(self, node: ast.Match, scope: _Scope, in_role: bool) -> list[_Item]:
        for case in node.cases:
            for part in ast.walk(case.pattern):
                name = getattr(part, "rest", None) or getattr(part, "name", None)
                if isinstance(part, ast.pattern) and name:
                    raise self._error(
                        part,
                        scope,
                        f"binds {name!r}, which is not translated, expected a value or _",
                    )
        source, at = scope.source, scope.source.at(node)
        cases = [
            ast.match_case(case.pattern, case.guard, [_assignment(_CHOSEN, i)])
            for i, case in enumerate(node.cases)
        ]
        chooser = ast.Module([_assignment(_CHOSEN, None), ast.Match(node.subject, cases)], [])
        code = compile(ast.fix_missing_locations(chooser), source.file, "exec")
        decisive = [
            node.subject,
            *(part for case in cases for part in (case.pattern, case.guard) if part),
        ]
        if not any(map(scope.parameters_in, decisive)):
            chosen = scope.evaluate(code, {}, at)
            return [] if chosen is None else self._items(node.cases[chosen].body, scope, in_role)
        branches = []
        for case in node.cases:
            pattern = ast.unparse(case.pattern)
            pattern = "else" if pattern == "_" else pattern
            slug = _slugged(f"{_written(node.subject, scope)} {pattern}")
            branches.append(self._branch(slug, case.body, source.at(case.pattern), scope, in_role))
        choose = functools.partial(scope.evaluate, code, at=at)
        return [_Choice(branches, choose)] if any(branches) else []

    def _branch(
        self, slug: str, body: Sequence[ast.stmt], at: Location, scope: _Scope, in_role: bool
    ) -> _ModuleOf | None:
        name = self._unique(slug)
        items = self._items(body, scope, in_role)
        return _ModuleOf(name, _numbered(items, Counter()), at) if items else None

    def _for(self, node: ast.For, scope: _Scope, in_role: bool) -> Iterator[_Item]:
        if parameters := scope.parameters_in(node.iter):
            raise self._error(
                node,
                scope,
                f"depends on {parameters[0]!r}, expected a loop over constants, as loops are unrolled when "
                "the schema is made",
            )
        targets = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        for part in ast.walk(node.target):
            if isinstance(part, ast.Attribute | ast.Subscript):
                raise self._error(part, scope, "is no loop variable, expected a name")
        if shadowed := sorted(targets & {*scope.source.max_tokens, *scope.constants}):
            raise self._error(
                node,
                scope,
                f"assigns {shadowed[0]!r}, which has a value already, expected another name",
            )
        assign = ast.Module([ast.Assign([node.target], ast.Name("_value", ast.Load()))], [])
        code = compile(ast.fix_missing_locations(assign), scope.source.file, "exec")
        at = scope.source.at(node)
        for value in self._passes_of(node, scope):
            names = scope.namespace({"_value": value})
            try:
                exec(code, names)
            except Exception as exc:  # a value that cannot be unpacked
                raise SchemaError(at, f"{value!r:.40} cannot be unpacked: {exc}") from exc
            inner = scope.with_constants({name: names[name] for name in targets})
            yield from self._items(node.body, inner, in_role)

    def _passes_of(self, node: ast.For, scope: _Scope) -> Iterator[Any]:
        try:
            iterator = iter(scope.constant(node.iter))
        except TypeError as exc:
            raise self._error(node.iter, scope, f"is no iterable: {exc}") from exc
        for value in iterator:
            self._passes += 1
            if self._passes > MAX_UNROLLED:
                raise self._error(
                    node, scope, f"makes more than {MAX_UNROLLED:,} passes, expected fewer"
                )
            yield value

    # -- the end of a prompt, which is not cached

    def _is_uncached(self, node: ast.stmt, scope: _Scope) -> bool:
        """Whether a statement outside of branches writes a parameter without length."""
        body = node.body if isinstance(node, ast.With) else [node]
        return any(
            name in scope.source.unbounded
            for each in body
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Yield)
            for name in scope.parameters_in(each)
            if not (
                isinstance(each.value.value, ast.Call) and self._callee(each.value.value, scope)
            )
        )

    def _uncached(self, body: Sequence[ast.stmt], scope: _Scope, role: str) -> Iterator[_Uncached]:
        for node in body:
            match node:
                case ast.Expr(ast.Yield(ast.expr() as value)) if not (
                    isinstance(value, ast.Call) and self._callee(value, scope)
                ):
                    if isinstance(value, ast.IfExp):
                        raise self._error(
                            value, scope, "is not translated, expected an if statement"
                        )
                    yield _Uncached(role, self._value(value, scope))
                case ast.With(items=[ast.withitem(expression, None)]) if not role:
                    tag = self._tag(expression, scope)
                    if tag == scaffold.tag:
                        raise self._error(
                            node, scope, "holds text that is not cached, expected modules"
                        )
                    parts = list(self._uncached(node.body, scope, tag))
                    yield _Uncached(
                        tag,
                        lambda values, parts=parts: "".join(part.value(values) for part in parts),  # type: ignore[misc]
                    )
                case _:
                    raise self._error(
                        node,
                        scope,
                        "follows text whose length is unknown, expected only yield with text",
                    )

    # -- names

    def _unique(self, slug: str) -> str:
        name, number = slug, 1
        while name in self._used:
            number += 1
            name = f"{slug}-{number}"
        self._used.add(name)
        return name


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


def _without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    match body[0]:
        case ast.Expr(ast.Constant(str())):
            return body[1:]
    return body


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


def _written(node: ast.expr, scope: _Scope) -> str:
    """The source of an expression, with the values of loop variables."""

    class Constants(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            value = scope.constants.get(name.id)
            return ast.Constant(value) if isinstance(value, str | int) else name

    return ast.unparse(Constants().visit(ast.parse(ast.unparse(node), mode="eval")))


def _slug(node: ast.expr, scope: _Scope) -> str:
    return _slugged(_written(node, scope))


def _slugged(text: str) -> str:
    """A name for a module: ``city == 'Rome'`` → ``city-Rome``."""
    slug = re.sub(r"\W+", "-", text)[:_NAME_CHARS].strip("-")
    if not slug:
        return "branch"
    slug = slug if is_name(slug) else f"if-{slug}"
    return slug if is_name(slug) else "branch"
