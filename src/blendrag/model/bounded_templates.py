"""Chat templates that end: a limit on the work and the text of one rendering.

A template comes with a model and is a program. transformers (5.23) renders it in jinja's sandbox, which keeps
it from the machine, but bounds neither time nor memory: nested loops, ``"a" * 10**10`` and a text that
doubles forty times all hang a process or fill its memory. Here every pass of a loop, every call and every
text that is made is paid from an allowance, before it is made where its size can be told.

A template may also look at the clock and draw at random. All renderings within one :func:`bounded` see the
same moment and draw alike, so that a prompt which is rendered several times is the same each time.

transformers compiles templates in one function, which is replaced for renderings within :func:`bounded`; all
other renderings of the process are left alone.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache, wraps
from random import Random
from secrets import randbits
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context

from blendrag.errors import InvalidInputError
from blendrag.model import compat

#: Bytes of all texts and lists that one rendering makes.
MAX_BYTES = 512 << 20
#: What a pass of a loop, a call or a value costs at least; about two million of them are allowed.
STEP_BYTES = 256
#: Largest number that is given to a filter or a method of a text, such as a width.
MAX_NUMBER = 100_000
#: Longest template, in characters; they have a few thousand, and 256 KiB take seconds to compile.
MAX_TEMPLATE_CHARS = 256 * 1024
#: Most bits of a number that is calculated.
MAX_BITS = 4096

#: The date that Llama 3's template names where it is not told today's.
FIXED_MOMENT = datetime(2024, 7, 26)

_allowance = threading.local()


@contextmanager
def bounded(moment: datetime | None = None) -> Iterator[None]:
    """Templates rendered by this thread within the context share one allowance, one moment and one seed.

    ``moment``: what the clock shows, which also fixes the seed; ``None``: the present. A template that
    exceeds the allowance raises :class:`InvalidInputError`.
    """
    if getattr(_allowance, "left", None) is not None:
        _allowance.draws = Random(_allowance.seed)
        yield  # a part of a rendering
        return
    _allowance.left = MAX_BYTES
    _allowance.moment = moment
    _allowance.seed = randbits(32) if moment is None else 0
    _allowance.draws = Random(_allowance.seed)
    try:
        yield
    finally:
        _allowance.left = None


def _strftime_now(format: str) -> str:
    """transformers' function of this name, for the moment of the context."""
    if _allowance.moment is None:
        _allowance.moment = compat.template_clock()
    return str(_allowance.moment.strftime(format))


@pass_context
def _random(context: Context, values: Any) -> Any:
    """jinja's filter, with the draws of the context."""
    try:
        return _allowance.draws.choice(values)
    except IndexError:
        return context.environment.undefined("No random item, sequence was empty.")


def names_in(template: str) -> frozenset[str] | None:
    """Names that a template reads, a few of its own among them; ``None`` if it cannot be told."""
    with suppress(Exception), bounded():  # jinja errors of many types
        return compat.template_variables(template)
    return None


def _spend(size_bytes: int) -> None:
    _allowance.left -= STEP_BYTES + size_bytes
    if _allowance.left < 0:
        raise InvalidInputError(
            f"it makes more than {MAX_BYTES >> 20} MiB of text, or takes more than "
            f"{MAX_BYTES // STEP_BYTES} steps; send less, or use a model with another chat template"
        )


def _spend_on(value: Any) -> Any:
    """Pay for all of ``value``, however often a part of it is repeated; returns it."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        _spend(_size_bytes(each))
        if isinstance(each, Mapping):
            waiting += (*each.keys(), *each.values())
        elif isinstance(each, list | tuple | set):
            waiting += each
    return value


def _size_bytes(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, str | list | tuple | dict | set) else 0


# -- sizes that can be told before a text is made ---------------------------------------------------

#: A width of six digits, one that is an argument, or one in another field.
_WIDE = re.compile(r"[0-9]{6}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise InvalidInputError("it formats with a width that is too large or unknown")


def _check_numbers(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise InvalidInputError(
                f"it gives the number {value:.3g} to a filter or method, expected at most {MAX_NUMBER}"
            )


def _spend_before(name: str, text: Any, args: tuple[Any, ...]) -> None:
    """Pay for the method or filter ``name`` of ``text``, whose result may be larger than what it is given."""
    size = _size_bytes(text)
    if name == "format":  # the filter
        _check_format(text)
    elif name == "replace" and isinstance(text, str) and len(args) > 1:
        old, new = map(str, args[:2])
        _spend(text.count(old) * sys.getsizeof(new))
    elif name == "join" and args:  # a separator and a list, or the other way round
        texts = args[0] if isinstance(text, str) else text
        _spend_on(texts)
        if isinstance(texts, list | tuple):
            _spend(len(texts) * sys.getsizeof(text if isinstance(text, str) else args[0]))
    elif name in ("indent", "wordwrap", "expandtabs") and isinstance(text, str):
        wide = max(
            (each if isinstance(each, int) else _size_bytes(each) for each in args), default=8
        )
        _spend(wide * (1 + sum(map(text.count, ("\n", "\t", " ")))))
    _spend(size)


# -- the environment --------------------------------------------------------------------------------

#: Filters that look at a value's own items only.
_SHALLOW = frozenset(
    {
        "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
        "rejectattr", "reverse", "select", "selectattr", "slice",
    }
)  # fmt: skip
#: Tests that compare.
_COMPARING = frozenset(
    {
        "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan",
        "lower", "lt", "ne", "upper",
    }
)  # fmt: skip
_STEP, _VALUE = "blendrag_step", "blendrag_value"


class _Environment(compat.TransformedTemplates):
    """transformers' environment, made to pay."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def transformed(self, tree: nodes.Template) -> nodes.Template:
        return _paying(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = [each for each in (left, right) if isinstance(each, int)]
        if len(numbers) == 2 and operator in ("*", "**"):
            power = operator == "**"
            bits = (
                left.bit_length() * abs(right) if power else left.bit_length() + right.bit_length()
            )
            if bits > MAX_BITS:
                raise InvalidInputError(f"it calculates a number of more than {MAX_BITS} bits")
        elif operator == "*" and numbers:
            _spend(max(0, numbers[0]) * (_size_bytes(left) + _size_bytes(right)))
        elif operator == "%":
            _check_format(left)
            _spend_on(right)
        made = super().call_binop(context, operator, left, right)
        _spend(_size_bytes(made))
        return made

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            values = (*args, *kwargs.values())
            _check_numbers(values)
            _spend_before(__obj.__name__, text, values)
        made = super().call(__context, __obj, *args, **kwargs)
        _spend(_size_bytes(made))
        return made

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> Any:
            _check_format(value.__self__)
            _spend_on([*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return formatted


def _paying(tree: nodes.Template) -> nodes.Template:
    """``tree`` with a step in each loop and macro; pays for values where they are compared, joined or cut."""
    loops, macros, calls = map(tree.find_all, (nodes.For, nodes.Macro, nodes.CallBlock))
    block: Any
    for block in (*loops, *macros, *calls):
        written = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
        block.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(written), _STEP)))
        if isinstance(block, nodes.For) and block.test is not None:
            block.test = _filtered(block.test, _VALUE)
    for compare in tree.find_all(nodes.Compare):
        compare.expr = _filtered(compare.expr, _VALUE)
        for operand in compare.ops:
            operand.expr = _filtered(operand.expr, _VALUE)
    for joined in tree.find_all(nodes.Concat):
        joined.nodes = [_filtered(each, _VALUE) for each in joined.nodes]
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):
            item.node = _filtered(item.node, _VALUE)
    return tree


def _filtered(value: Any, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _paying_filter(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(real, "jinja_pass_arg"))  # the context comes before the value

    @wraps(real)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        value, given = args[first], (*args[first + 1 :], *kwargs.values())
        _check_numbers(given)
        if name not in _SHALLOW:
            _spend_on(value)
        elif hasattr(value, "__len__"):
            _spend(STEP_BYTES * len(value))
        _spend_before(name, value, given)
        made = real(*args, **kwargs)
        _spend(_size_bytes(made))
        return made

    return filtered


def _paying_test(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def tested(*args: Any) -> Any:
        _spend_on(args)
        return real(*args)

    return tested


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """transformers' environment with its extensions, filters and globals."""
    own_text = "{# blendrag #}"  # so that nobody else has this environment
    made: Any = compat.stock_template_compiler(own_text).environment
    made.__class__ = _Environment
    made.optimized = False  # the optimizer would run what it can before a rendering
    made.finalize = _spend_on
    made.filters = {name: _paying_filter(name, real) for name, real in made.filters.items()}
    made.filters |= {_STEP: _spend, _VALUE: _spend_on, "random": _paying_filter("random", _random)}
    made.tests |= {name: _paying_test(made.tests[name]) for name in _COMPARING & made.tests.keys()}
    made.globals.pop("lipsum", None)
    made.globals["strftime_now"] = _strftime_now
    return made


@lru_cache(maxsize=32)
def _bounded_compile(chat_template: str) -> Template:
    if len(chat_template) > MAX_TEMPLATE_CHARS:
        raise InvalidInputError(
            f"it has {len(chat_template)} characters, expected at most {MAX_TEMPLATE_CHARS}; use a model "
            "with another chat template"
        )
    return _environment().from_string(chat_template)


def _compile(chat_template: str) -> Any:
    within = getattr(_allowance, "left", None) is not None
    return (_bounded_compile if within else compat.stock_template_compiler)(chat_template)


compat.replace_template_compiler(_compile)
