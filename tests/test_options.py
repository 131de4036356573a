"""The table of options: surfaces have what it says, and refuse a wrong value in the same words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from blendrag.chat.template_arguments import template_arguments
from blendrag.cli.app import app
from blendrag.cli.options import SAMPLING
from blendrag.config import OPTIONS, Settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.reranker import Reranker
from blendrag.engine import BlendEngine, Options
from blendrag.engine.request import OptionFields
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.frameworks.engines import shared_engine
from blendrag.frameworks.fields import CALL_OPTIONS, RequestFields
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.model.loading import load_adapter, load_tokens, resolve_device
from blendrag.model.writer import Writer
from blendrag.option import near_names, parse_arguments
from blendrag.server.bodies import BlendOptions, ChatBody
from blendrag.server.refusals import OPTION_FIELDS, of_body
from blendrag.store.remote.objects import RemoteObjects
from cli.commands import invoke
from lab.pages.options_page import PAGE, page

#: All but those whose options are their own.
COMMANDS: dict[str, Any] = {
    name: command
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    if name not in ("bench", "eval")
}
OF_BODIES = {*ChatBody.model_fields, *(f"blendrag.{name}" for name in BlendOptions.model_fields)}


def parameters(call: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(call).parameters)


def of(command: str) -> set[str]:
    """The options of the table that a command has."""
    return {each.name for each in COMMANDS[command].params if each.name in OPTIONS}


def of_ray() -> set[str]:
    pytest.importorskip("ray")
    from blendrag_ray.settings import ServedCluster

    return set(ServedCluster.model_fields)


def of_call(name: str) -> set[str]:
    return parameters(getattr(BlendEngine, name)) - {"top_k"}


CALLS = ("generate", "stream", "agenerate", "astream", "batch", "abatch", "ask", "ask_stream")
SURFACES: dict[str, list[Callable[[], set[str]]]] = {
    "env": [lambda: {each.name for each in fields(Settings)}],
    "engine": [lambda: parameters(BlendEngine.__init__), lambda: parameters(shared_engine)],
    "request": [
        lambda: {each.name for each in fields(Options)},
        lambda: set(OptionFields.__annotations__),
        *(partial(of_call, name) for name in CALLS),
    ],
    "wrapper": [lambda: {*RequestFields.model_fields, *CALL_OPTIONS} - {"max_tokens"}],
    "cli": [lambda: set[str]().union(*map(of, COMMANDS)) - {"explain"}],  # which names a file
    "server": [
        lambda: (
            {name for name in OPTIONS if OPTION_FIELDS.get(name, name) in OF_BODIES}
            - {"model", "store", "max_tokens"}
        )
    ],
    "ray": [of_ray],
}


@pytest.mark.parametrize("where", SURFACES)
def test_a_surface_has_the_options_that_the_table_says(where: str) -> None:
    expected = {name for name, option in OPTIONS.items() if where in option.where.split()}
    for found in SURFACES[where]:
        assert found() & OPTIONS.keys() == expected


def test_the_table_names_no_other_surface() -> None:
    assert {where for option in OPTIONS.values() for where in option.where.split()} == set(SURFACES)


def test_commands_that_answer_have_the_same_options() -> None:
    assert of("ask") - {"explain"} == of("chat")
    new_corpus = {"chunk_tokens", "kv_encoding"}
    limits = {"max_requests", "max_body_bytes", "max_upload_bytes", "max_tokens"}
    assert of("serve") == of("chat") - {*SAMPLING} | new_corpus | limits
    assert of("ingest") < of("serve")


def test_the_page_of_options_is_the_table() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(written), "run python -m lab.pages.options_page"


def test_help_of_a_command_is_the_help_of_the_table() -> None:
    for command in COMMANDS.values():
        for each in command.params:
            if each.name in OPTIONS and each.name not in ("explain", "ratio", "model"):
                assert each.help.startswith(OPTIONS[each.name].help)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [("mdoe", "mode"), ("timeout", "timeout_s"), ("encoding", "kv_encoding"), ("template", "")],
)
def test_only_a_name_that_is_much_alike_is_suggested(unknown: str, meant: str) -> None:
    assert near_names([unknown], OPTIONS)[:1] == ([meant] if meant else [])


# -- the same sentence ----------------------------------------------------------------------------


def constructor(name: str, value: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        BlendEngine("demo", "never-made", **{name: value})
    return str(raised.value)


def request(name: str, value: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        Options(**{name: value})
    return str(raised.value)


def field(name: str, value: Any) -> str:
    with pytest.raises(ValidationError) as raised:
        RequestFields(**{"model": "demo", "store": "never-made", name: value})
    return str(raised.value.errors()[0]["msg"]).removeprefix("Value error, ")


def call(name: str, value: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        RequestFields(model="demo", store="never-made").request_options(**{name: value})
    return str(raised.value)


def body(name: str, value: Any) -> str:
    """What a client is told, with the option's own name."""
    spelled = OPTION_FIELDS.get(name, name)
    *parents, last = spelled.split(".")
    given: dict[str, Any] = {
        "messages": [],
        **({parents[0]: {last: value}} if parents else {last: value}),
    }
    with pytest.raises(ValidationError) as raised:
        ChatBody.model_validate(given)
    errors = [each | {"loc": ("body", *each["loc"])} for each in raised.value.errors()]
    refusal = of_body(RequestValidationError(errors, body=given))
    assert refusal.param == spelled
    return f"{name}{str(refusal).removeprefix(spelled)}"


def variable(name: str, value: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"BLENDRAG_{name.upper()}", str(value))
        with pytest.raises(InvalidInputError) as raised:
            Settings.from_environment()
    return f"{name}{str(raised.value).removeprefix(f'BLENDRAG_{name.upper()}')}"


#: Values that are found wrong where they are used, and that use.
LATER: dict[str, tuple[str, Callable[[str], Any]]] = {
    "model": ("./no-model", load_tokens),
    "store": ("/dev/null/store", lambda value: Corpus.open(Path(value))),
    "dtype": ("float7", lambda value: load_adapter(dtype=value)),
    "device": ("gpu", resolve_device),
    "writer": ("/no/writer", Writer.load),
    "embedder": ("/no/embedder", lambda value: Embedder(value).dim),
    "reranker": ("/no/reranker", lambda value: Reranker(value).scores("one", ["two"])),
    "remote": ("bucket", lambda value: RemoteObjects(value, 1.0)),
    "policy": ("fast", make_policy),
    "schedule": ("steep", Schedule.parse),
    "chat_template_kwargs": (
        "pace=fast",
        lambda value: template_arguments(load_tokens("demo"), parse_arguments(value), None, None),
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_wrong_values_that_are_found_later_name_their_variable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, use = LATER[name]
    sentences = []
    for given in ("", value):
        monkeypatch.setenv(f"BLENDRAG_{name.upper()}", given)
        with pytest.raises(BlendragError) as raised:
            use(value)
        sentences.append(str(raised.value))
    without, named = sentences
    assert named.replace(f" (BLENDRAG_{name.upper()})", "", 1) == without != named


def test_every_variable_is_checked_when_it_is_read_or_named_later() -> None:
    texts = {
        each.name
        for each in fields(Settings)
        if OPTIONS[each.name].expected in ("a text", "a path", "a model")
    }
    assert texts - LATER.keys() == {"cache", "remote_key", "system"}


def command(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    result = invoke("ingest" if name == "chunk_tokens" else "ask", "q", flag, str(value))
    assert result.exit_code == 2
    *_, last = result.stderr.splitlines()
    return last.replace(f"Error: Invalid value for '{flag}':", name)


def deployment(name: str, value: Any) -> str:
    pytest.importorskip("ray")
    from blendrag_ray.settings import ServedCluster

    with pytest.raises(InvalidInputError) as raised:
        ServedCluster.of({name: value})
    return str(raised.value)


FROM = {"env": [variable], "engine": [constructor], "request": [request], "wrapper": [field],
        "cli": [command], "server": [body], "ray": [deployment]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mode", "turbo", "'turbo' must be one of blend, full, prefix, reuse"),
        ("ratio", 1.5, "1.5 must be a number in [0, 1] or 'auto'"),
        ("ratio", "fast", "'fast' must be a number in [0, 1] or 'auto'"),
        ("min_ratio", -1, "-1 must be a number in [0, 1]"),
        ("max_new_tokens", 0, "0 must be a whole number of at least 1"),
        ("max_new_tokens", "5x", "'5x' must be a whole number of at least 1"),
        ("top_k", 0, "0 must be a whole number of at least 1"),
        ("encode_after", 5, "5 must be a whole number in [0, 4]"),
        ("chunk_tokens", 8, "8 must be a whole number in [64, 4096]"),
        ("ram_bytes", "much", "'much' must be a number of bytes; as text also 500MB or 2GiB"),
        ("seed", 2**64, "18446744073709551616 must be a whole number of at most 64 bits"),
        ("top_p", 0, "0 must be a number in (0, 1]"),
        ("presence_penalty", 3, "3 must be a number in [-2, 2]"),
        ("timeout_s", 0, "0 must be a number of seconds above 0"),
        ("temperature", -1, "-1 must be 0, or a number of at least 1e-30"),
        (
            "chat_template_kwargs",
            "low",
            "'low' must be a dictionary; as text NAME=VALUE or a JSON object",
        ),
        ("policy", "magic", "'magic' is not one of "),
    ],
)
def test_a_wrong_value_is_refused_in_the_same_words_everywhere(
    name: str, value: Any, expected: str
) -> None:
    for where in OPTIONS[name].where.split():
        for say in FROM[where]:
            if name == "policy" and where in ("env", "cli", "server", "ray"):
                continue  # checked when it is used
            if name == "top_k" and where == "wrapper":
                continue
            assert say(name, value).startswith(f"{name} {expected}"), where


def test_a_call_is_told_the_name_that_it_used() -> None:
    assert call("timeout", 0).startswith("timeout 0 must be a number of seconds above 0")
    assert call("timeout_s", 0).startswith("timeout_s 0 must be")


@pytest.mark.parametrize(
    ("misspelt", "near"),
    [("template_kwargs", "chat_template_kwargs"), ("encoding", "kv_encoding"), ("dtyp", "dtype")],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(misspelt: str, near: str) -> None:
    for make in (BlendEngine, shared_engine, RequestFields):
        with pytest.raises(ValueError, match=f"{misspelt}: not .*did you mean .*{near}"):
            make(model="demo", **{misspelt: "x"})
