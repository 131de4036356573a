"""A prompt program, called with values, gives a prompt that reads as the function would write it."""

from __future__ import annotations

import linecache
import textwrap
from copy import copy
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.errors import InvalidInputError, SchemaError
from blendrag.schema import programs
from blendrag.schema.checking import length_errors, resolve
from blendrag.schema.markup import parse_prompt, parse_schema
from blendrag.schema.parts import FilledParameter
from blendrag.schema.programs import Program
from schema.test_markup import outline

HEAD = """\
from __future__ import annotations
from typing import Annotated, Literal
from blendrag.schema.programs import MaxTokens, assistant, scaffold, schema, system, user
"""
_numbers = count()


def load(source: str, **names: Any) -> dict[str, Any]:
    """What a file with this source defines."""
    file = f"<program {next(_numbers)}>"
    source = HEAD + textwrap.dedent(source)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"__name__": file, **names}
    exec(compile(source, file, "exec"), names)
    return names


def program(source: str, **names: Any) -> Program:
    """The last program of a file."""
    found = [value for value in load(source, **names).values() if isinstance(value, Program)]
    return found[-1]


def reading(made: Program, *args: Any, **kwargs: Any) -> str:
    """The text of the prompt that a program makes."""
    parts = resolve(made.schema, parse_prompt(made(*args, **kwargs)))
    return "".join(
        part.argument.text if isinstance(part, FilledParameter) else part.text.text
        for part in parts
    )


TRIP = """
    @schema
    def rome(days: Annotated[str, MaxTokens(3)], art: bool = False):
        '''Not part of the text.'''
        yield f"Rome for {days}.\\n"
        if art:
            yield "I like museums.\\n"

    @schema
    def trip(
        duration: Annotated[str, MaxTokens(5)], abroad: bool, city: str, notes: list[str], question: str
    ):
        with system:
            yield "You are a travel planner."
        yield f"Plan a trip of {duration}.\\n"
        if abroad:
            yield "I have a passport.\\n"
        match city:
            case "tokyo":
                yield "Tokyo is busy.\\n"
            case "rome" | "roma":
                yield rome(duration, art=abroad)
        for name, text in NOTES.items():
            if name in notes:
                yield f"{name}: {text}\\n"
        with user:
            yield f"{question}?"
"""
NOTES = {"visa.md": "A visa takes a week.", "food.md": "No peanuts."}


def test_a_program_becomes_a_schema():
    made = program(TRIP, NOTES=NOTES)
    assert made.schema.name == "trip"
    assert list(made.schema.modules) == [
        "trip", "abroad", "city-tokyo", "city-rome-roma", "rome", "art", "visa-md-in-notes",
        "food-md-in-notes",
    ]  # fmt: skip
    places = made.schema.places
    assert [parent.name for parent in places["art"].parents] == ["trip", "city-rome-roma", "rome"]
    assert places["city-tokyo"].choices[0][0] is places["city-rome-roma"].choices[0][0]
    assert not places["abroad"].choices
    assert '<param name="duration" len="5"/>' in made.markup
    assert '<param name="days" len="3"/>' in made.markup
    assert "Not part" not in made.markup


def test_a_call_makes_a_prompt():
    made = program(TRIP, NOTES=NOTES)
    assert made("3 days", True, "roma", ["food.md"], question="Where to <b>") == (
        '<prompt schema="trip" xml:space="preserve"><trip duration="3 days"><abroad></abroad><city-rome-roma>'
        '<rome days="3 days"><art></art></rome></city-rome-roma><food-md-in-notes></food-md-in-notes></trip>'
        "<user>Where to &lt;b&gt;?</user></prompt>"
    )
    assert reading(made, "a\nweek", False, "oslo", [], "Where") == (
        "You are a travel planner.Plan a trip of a\nweek.\nWhere?"
    )


def test_text_outside_of_modules_stays_there_without_parameters():
    made = program("@schema\ndef p(x: bool):\n    yield 'a < b'\n    if x:\n        yield 'c'")
    assert made.markup == (
        '<schema name="p" xml:space="preserve">a &lt; b<module name="x">c</module></schema>'
    )
    assert reading(made, True) == "a < bc"


def test_if_elif_else_is_one_union_and_the_first_true_branch_is_taken():
    made = program(
        """
        @schema
        def p(n: int):
            if n > 5:
                yield "large"
            elif n > 2:
                yield "medium"
            else:
                yield "small"
        """
    )
    assert made.markup.count("<union>") == 1
    assert list(made.schema.modules) == ["n-5", "n-2", "n-5-else"]
    assert [reading(made, n) for n in (9, 3, 0)] == ["large", "medium", "small"]


def test_a_branch_without_text_is_no_module():
    made = program(
        """
        @schema
        def p(x: bool):
            yield "text"
            if x:
                pass
            else:
                yield "not"
        """
    )
    assert list(made.schema.modules) == ["x-else"]
    assert [reading(made, x) for x in (True, False)] == ["text", "textnot"]


def test_conditions_on_constants_are_decided_when_the_schema_is_made():
    made = program(
        """
        @schema
        def p(x: bool):
            for i in range(3):
                if i == 1:
                    yield "one"
                elif x:
                    yield f"{i}x"
        """
    )
    assert list(made.schema.modules) == ["x", "x-2"]
    assert [reading(made, x) for x in (True, False)] == ["0xone2x", "one"]


def test_a_parameter_may_be_written_twice_and_formatted():
    made = program(
        """
        @schema
        def p(n: Annotated[int, MaxTokens(4)], who: Annotated[str, MaxTokens(4)]):
            yield f"{n:03d} of {n!r} for " + who.title() + "."
        """
    )
    assert [name for name in ("n", "n-2", "who") if f'"{name}" len="4"' in made.markup] == [
        "n",
        "n-2",
        "who",
    ]
    assert reading(made, 7, who="anna bell") == "007 of 7 for Anna Bell."


def test_a_constant_argument_of_a_call_is_cached_text():
    made = program(
        """
        @schema
        def greet(name: Annotated[str, MaxTokens(4)]):
            yield f"Hello {name}. "

        @schema
        def p():
            for name in ("Ann", "Bob"):
                yield greet(name)
        """
    )
    assert (
        '<module name="greet">Hello Ann. </module><module name="greet-2">Hello Bob. </module>'
        in made.markup
    )
    assert reading(made) == "Hello Ann. Hello Bob. "


def test_scaffolds_have_the_modules_of_a_block_for_each_choice_of_branches():
    made = program(
        """
        @schema
        def rome():
            yield "Rome."

        @schema
        def p(city: str, visa: bool, pets: bool):
            with scaffold:
                match city:
                    case "rome":
                        yield rome()
                    case "oslo":
                        yield "Oslo."
                with user:
                    if visa:
                        yield "Visa."
            if pets:
                yield "Pets."
        """
    )
    assert [each.modules for each in made.schema.scaffolds] == [
        ("rome", "visa"),
        ("city-oslo", "visa"),
    ]
    assert reading(made, "oslo", True, False) == "Oslo.Visa."


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("yield 'a'\n    print('b')", 2, '"print(\'b\')" is not translated, expected yield, if'),
        ("yield 'a'\n    x = 1", 2, "'x = 1' is not translated"),
        ("yield 'a'\n    return", 2, "'return' is not translated"),
        ("yield 'a'\n    'b'", 2, "does nothing; write yield before the text"),
        ("yield from ['a']", 1, "is not translated, expected yield"),
        ("while True:\n        yield 'a'", 1, "'while True:' is not translated"),
        ("yield 5", 1, "is 5, expected a str; write an f-string"),
        ("yield 'a\\x01'", 1, "holds '\\x01', which XML cannot hold"),
        ("yield unknown", 1, "this cannot be evaluated: NameError: name 'unknown' is not defined"),
        ("for i in range(n):\n        yield 'a'", 1, "depends on 'n', expected a loop over constants"),
        ("for i in 5:\n        yield 'a'", 1, "is no iterable"),
        ("for i in iter(int, 1):\n        yield 'a'", 1, "makes more than 100,000 passes"),
        ("for i, j in [1]:\n        yield 'a'", 1, "1 cannot be unpacked"),
        ("if n:\n        yield f'{n}'", 2, "uses parameter 'n', whose length is unknown; expected n"),
        ("if n:\n        yield f'{s}'", 2, "uses parameter 's', whose length is unknown"),
        ("yield f'{p + q}'", 1, "uses p and q, expected one parameter"),
        ("yield 'a' if n else 'b'", 1, "expected an if statement"),
        ("yield 'a'\n    yield f'{s}'\n    if n:\n        yield 'a'", 3, "follows text whose length"),
        ("for n in [1]:\n        yield 'a'", 1, "assigns 'n', which has a value already"),
        ("for x in [1]:\n        for x in [2]:\n            yield 'a'", 2, "assigns 'x', which has a"),
        ("if (x := n):\n        yield 'a'", 1, "is not translated"),
        ("match n:\n        case x:\n            yield 'a'", 2, "binds 'x', which is not translated"),
        ("match n:\n        case [*x]:\n            yield 'a'", 2, "binds 'x', which is not translated"),
        ("with open('f'):\n        yield 'a'", 1, "this cannot be evaluated: FileNotFoundError"),
        ("with user:\n        with user:\n            yield 'a'", 2, "is inside a role, expected outside"),
        ("with n:\n        yield 'a'", 1, "expected system, user, assistant or scaffold"),
        ("with scaffold:\n        yield 'a'", 1, "holds text, expected only if, match, for"),
        ("yield 'a'\n    with scaffold:\n        yield s", 2, "holds text that is not cached"),
        ("with scaffold:\n        if n:\n            yield 'a'", 1, "holds fewer than two modules"),
        (
            "with scaffold:\n        for i in range(9):\n            if n > i:\n                yield 'a'\n"
            "            else:\n                yield 'b'",
            1,
            "has more than 100 combinations of branches",
        ),
        ("pass", 0, "f() has no text to cache, expected yield with text"),
        ("yield f'{s}'", 0, "f() has no text to cache, expected yield with text"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_names_its_line(body: str, line: int, message: str):
    """``line`` counts from the line after ``def``."""
    source = f"""@schema
def f(n: int, p: Annotated[str, MaxTokens(2)], q: Annotated[str, MaxTokens(2)], s: str):
    {body}"""
    with pytest.raises(SchemaError) as caught:
        program(source)
    assert message in str(caught.value)
    assert str(caught.value).split(":")[1] == str(HEAD.count("\n") + 2 + line)


def test_wrong_calls_and_definitions_are_refused():
    made = program(TRIP, NOTES=NOTES)
    with pytest.raises(InvalidInputError, match="missing a required argument: 'abroad'"):
        made("3 days")
    with pytest.raises(SchemaError, match="is 3, expected a str; write an f-string"):
        program("@schema\ndef p(x: Annotated[int, MaxTokens(1)]):\n    yield x")(3)
    with pytest.raises(SchemaError, match=r"ZeroDivisionError"):
        program("@schema\ndef p(x: int):\n    if 1 / x:\n        yield 'a'")(0)
    with pytest.raises(SchemaError, match="cannot be a name in XML"):
        program(f"@schema\ndef {'f' * 201}():\n    yield 'a'")
    with pytest.raises(
        InvalidInputError, match=r"MaxTokens\(0\), expected a number of tokens from 1"
    ):
        programs.MaxTokens(0)
    with pytest.raises(SchemaError, match=r"\*rest is not translated, expected named parameters"):
        program("@schema\ndef p(*rest):\n    yield 'a'")
    with pytest.raises(SchemaError, match=r"does not fit q\(\): too many positional arguments"):
        program("@schema\ndef q():\n    yield 'a'\n@schema\ndef p():\n    yield q(1)")
    with pytest.raises(InvalidInputError, match="is no function"):
        programs.schema(3)  # type: ignore[arg-type]
    namespace: dict[str, Any] = {}
    exec("def nowhere():\n    yield 'a'", namespace)
    with pytest.raises(InvalidInputError, match=r"the source of nowhere\(\) is not available"):
        programs.schema(namespace["nowhere"])


def test_errors_of_a_prompt_name_the_call_and_those_of_the_schema_the_parameter():
    names = load(
        """
        @schema
        def p(days: Annotated[str, MaxTokens(2)]):
            if len(days) > 1:
                yield f"For {days}."

        prompt = p(
            "one two three")
        """
    )
    made, at = names["p"], HEAD.count("\n") + 2
    parts = resolve(made.schema, parse_prompt(copy(names["prompt"])))
    [error] = length_errors(parts, lambda text: len(text.split()))
    file = names["__name__"]
    assert str(error).startswith(f"{file}:{at + 5}:1: days='one two three' has 3 tokens")
    assert f"expected at most 2 ({file}:{at + 3}:" in str(error)
    [text, *_] = parts
    assert text.text.at.line == at + 2


# -- any program ----------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from("ab <>&\"'\\{}\n\t\r é€😀]"), max_size=8)
EXPRESSIONS = st.one_of(
    TEXTS.map(repr),
    st.sampled_from(
        ["a", "b", "f'{a}'", "f'{b:>4}!'", "f'<{a}>{{'", "'x' + b", "f'{CONSTANT}{a}'"]
    ),
)
CONDITIONS = st.sampled_from(
    ["x", "y", "not x", "n > 1", "n == 2", "x and y", "CONSTANT", "not CONSTANT", "a == 'z'"]
)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines] or ["    pass"]


def _if(branches: list[tuple[str, list[str]]], otherwise: list[str] | None) -> list[str]:
    lines = []
    for i, (condition, body) in enumerate(branches):
        lines += [f"{'elif' if i else 'if'} {condition}:", *_indented(body)]
    return lines if otherwise is None else [*lines, "else:", *_indented(otherwise)]


def _match(cases: dict[str, list[str]]) -> list[str]:
    lines = ["match n:"]
    for pattern in sorted(cases, key=lambda pattern: pattern == "_"):
        lines += [f"    case {pattern}:", *_indented(_indented(cases[pattern]))]
    return lines


def _for(values: list[str], body: list[str]) -> list[str]:
    """Loops inside each other have different variables."""
    name = f"k{sum('for ' in line for line in body)}"
    return [f"for {name} in {values!r}:", f"    yield f'{{{name}}}'", *_indented(body)]


CALLS = st.sampled_from(["inner(a, x)", "inner(b, y=n > 1)", "inner('fixed', True)"]).map(
    lambda call: [f"yield {call}"]
)


def _statements(body: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    return st.one_of(
        EXPRESSIONS.map(lambda text: [f"yield {text}"]),
        st.builds(
            _if,
            st.lists(st.tuples(CONDITIONS, body), min_size=1, max_size=3),
            st.none() | body,
        ),
        st.dictionaries(
            st.sampled_from(["0", "1 | 2", "3", "int() if x", "_"]), body, min_size=1, max_size=3
        ).map(_match),
        st.builds(_for, st.lists(TEXTS, max_size=2), body),
        CALLS,
        st.builds(
            lambda call, body: [
                "with scaffold:",
                *_indented([*call, *_if([("x", ["yield 'if'"])], ["yield 'else'", *body])]),
            ],
            CALLS,
            body,
        ),
    )


BODIES = st.recursive(
    st.just([]),
    lambda body: st.lists(_statements(body), max_size=4).map(
        lambda parts: list(chain.from_iterable(parts))
    ),
    max_leaves=8,
)


def _in_roles(blocks: list[tuple[str, list[str]]]) -> list[str]:
    lines = []
    for role, body in blocks:
        lines += [f"with {role}:", *_indented(body)] if role else body
    return lines


#: Statements of a whole program: roles are not inside each other.
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(["", "", "system", "user", "assistant"]), BODIES), max_size=3
).map(_in_roles)
INNER = """
@schema
def inner(c: Annotated[str, MaxTokens(9)], y: bool = False):
    yield f"inner {c}"
    if y:
        yield f"[{c}]"
"""


@settings(max_examples=100, deadline=None)
@given(PROGRAMS, TEXTS, TEXTS, st.booleans(), st.booleans(), st.integers(0, 4))
def test_prompts_of_a_program_read_as_the_program_writes(body, a, b, x, y, n):
    """The oracle is Python: the same functions run as generators."""
    names = (
        "a: Annotated[str, MaxTokens(9)], b: Annotated[str, MaxTokens(9)], x: bool, y: bool, n: int"
    )
    source = f"{INNER}\n@schema\ndef outer({names}):\n" + "\n".join(
        _indented(["yield 'start'", *body])
    )
    plain = load(
        source.replace("@schema", "").replace("yield inner", "yield from inner"), CONSTANT="c"
    )
    made = program(source, CONSTANT="c")
    assert reading(made, a, b, x, y, n) == "".join(plain["outer"](a, b, x, y, n))
    assert all(len(each.modules) == 2 for each in made.schema.scaffolds)
    parsed = parse_schema(made.markup)
    assert outline(made.schema.children) == outline(parsed.children)
    assert [each.modules for each in made.schema.scaffolds] == [
        each.modules for each in parsed.scaffolds
    ]
