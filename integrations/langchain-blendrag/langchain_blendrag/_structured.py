"""Structured output: by a required call, or as an answer in JSON. What is no result is an error, never
``None``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from blendrag.errors import InvalidInputError
from blendrag.wording import quoted, shortened

Method = Literal["function_calling", "json_schema", "json_mode"]


def structured(
    model: BaseChatModel,
    can_force: Callable[[], bool],
    schema: Any,
    method: Method | None,
    strict: bool | None,
    include_raw: bool,
) -> Runnable[Any, Any]:
    """``model`` followed by a parser. ``can_force``: whether ``model`` can be made to call a tool, asked if
    ``method`` may need one."""
    if method is None:
        takes_tools = schema is not None and can_force()
        method = "function_calling" if takes_tools else "json_schema"
    if method not in get_args(Method):
        raise InvalidInputError(
            f"method {method!r} is not one of function_calling, json_schema, json_mode"
        )
    if schema is None and method != "json_mode":
        raise InvalidInputError(
            f"method {method!r} needs a schema; only json_mode works without one"
        )
    bound, parser = (
        _by_call(model, schema, strict, can_force())
        if method == "function_calling"
        else _by_asking(model, schema, method, strict)
    )
    return _with_raw(bound, parser) if include_raw else bound | parser


def _by_call(
    model: BaseChatModel, schema: Any, strict: bool | None, is_forced: bool
) -> tuple[Any, Any]:
    tool = convert_to_openai_tool(schema, strict=strict)
    name = tool["function"]["name"]
    bound = model.bind_tools(
        [tool],
        tool_choice=name if is_forced else None,
        ls_structured_output_format=_traced("function_calling", schema),
    )
    if _is_model(schema):
        return bound, _CalledModel(tools=[schema], first_tool_only=True)
    return bound, _CalledKey(key_name=name, first_tool_only=True)


def _by_asking(
    model: BaseChatModel, schema: Any, method: Method, strict: bool | None
) -> tuple[Any, Any]:
    """In ``json_mode`` the prompt describes the schema, as with LangChain's other models."""
    wanted: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        # the parser checks what the form does not enforce
        named = {"schema": convert_to_json_schema(schema), "strict": strict is True}
        wanted = {"type": "json_schema", "json_schema": named}
    traced = {} if schema is None else {"ls_structured_output_format": _traced(method, schema)}
    bound = model.bind(response_format=wanted, **traced)
    return bound, _AnsweredModel(pydantic_object=schema) if _is_model(schema) else _AnsweredJson()


def _traced(method: Method, schema: Any) -> dict[str, Any]:
    return {"kwargs": {"method": method}, "schema": schema}


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _with_raw(bound: Runnable[Any, AIMessage], parser: Any) -> Runnable[Any, Mapping[str, Any]]:
    """``raw``, ``parsed`` and ``parsing_error``, as in ``BaseChatModel.with_structured_output``."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


# -- parsers -----------------------------------------------------------------------------------------


def _whole(result: list[Generation], partial: bool) -> BaseMessage | None:
    """The message, if nothing follows."""
    message = result[0].message if isinstance(result[0], ChatGeneration) else None
    is_whole = not partial or getattr(message, "chunk_position", None) == "last"
    return message if is_whole else None


def _is_cut(message: BaseMessage) -> bool:
    return message.response_metadata.get("finish_reason") == "length"


class _CalledModel(PydanticToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_call(_whole(result, partial), [tool.__name__ for tool in self.tools])
        return super().parse_result(result, partial=partial)


class _CalledKey(JsonOutputKeyToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_call(_whole(result, partial), [self.key_name])
        found = super().parse_result(result, partial=partial)
        # a call without arguments is an empty dictionary
        return {} if found is None and _whole(result, partial) is not None else found


def _require_call(message: BaseMessage | None, names: list[str]) -> None:
    """Raise :class:`OutputParserException` if ``message`` calls none of these tools."""
    if not isinstance(message, AIMessage) or any(c["name"] in names for c in message.tool_calls):
        return
    if _is_cut(message):
        why = "was cut before its call was complete; give more max_tokens"
    elif message.invalid_tool_calls:
        why = f"has a call that cannot be read ({message.invalid_tool_calls[0]['error']})"
    else:
        why = f"is {quoted(str(message.content))}, no call; try method='json_schema'"
    raise OutputParserException(f"the answer {why}", llm_output=str(message.content))


class _AnsweredModel(PydanticOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_json(_whole(result, partial), result[0].text)
        return super().parse_result(result, partial=partial)


class _AnsweredJson(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_json(_whole(result, partial), result[0].text)
        return super().parse_result(result, partial=partial)


def _require_json(message: BaseMessage | None, text: str) -> None:
    """Raise :class:`OutputParserException` for JSON that was cut, which LangChain would complete."""
    if message is None or not _is_cut(message):
        return
    try:
        json.loads(text)
    except ValueError:
        raise OutputParserException(
            f"the answer was cut before its JSON was complete ({shortened(text)}); give more max_tokens",
            llm_output=text,
        ) from None
