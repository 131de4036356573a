"""``with_structured_output``: by a forced call where the model's template has tools, else by asking.

A local model's tokens are not constrained to a schema here; what does not follow it is an error of the
parser, or ``parsing_error`` with ``include_raw``.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from blendrag.errors import InvalidInputError
from blendrag.frameworks.tools import has_tools

if TYPE_CHECKING:
    from langchain_blendrag.chat_models import ChatBlend

Method = Literal["function_calling", "json_schema", "json_mode"]


def structured(
    model: ChatBlend, schema: Any, method: Method | None, strict: bool | None, include_raw: bool
) -> Runnable[Any, Any]:
    """``model`` with a parser behind it. Opens the tokenizer where ``method`` is not given."""
    if method is None:
        takes_tools = has_tools(model.engine.resources.tokens)
        method = "function_calling" if takes_tools and schema is not None else "json_schema"
    if method not in ("function_calling", "json_schema", "json_mode"):
        raise InvalidInputError(
            f"method {method!r} is not one of function_calling, json_schema, json_mode"
        )
    if schema is None and method != "json_mode":
        raise InvalidInputError(f"method {method!r} needs a schema; only json_mode does without")
    asked, parser = (
        _by_call(model, schema, strict)
        if method == "function_calling"
        else _by_asking(model, schema, method)
    )
    return _with_raw(asked, parser) if include_raw else asked | parser


def _by_call(model: ChatBlend, schema: Any, strict: bool | None) -> tuple[Any, Any]:
    tool = convert_to_openai_tool(schema, strict=strict)
    name = tool["function"]["name"]
    asked = model.bind_tools(
        [tool],
        tool_choice=name,
        ls_structured_output_format=_traced("function_calling", schema),
    )
    if _is_model(schema):
        return asked, PydanticToolsParser(tools=[schema], first_tool_only=True)
    return asked, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _by_asking(model: ChatBlend, schema: Any, method: Method) -> tuple[Any, Any]:
    """``json_mode`` leaves it to the prompt to describe the schema, as LangChain's other models do."""
    wanted: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        named = convert_to_json_schema(schema)
        wanted = {"type": "json_schema", "json_schema": {"schema": named}}
    traced = {} if schema is None else {"ls_structured_output_format": _traced(method, schema)}
    asked = model.bind(response_format=wanted, **traced)
    parser = (
        PydanticOutputParser(pydantic_object=schema) if _is_model(schema) else JsonOutputParser()
    )
    return asked, parser


def _traced(method: Method, schema: Any) -> dict[str, Any]:
    return {"kwargs": {"method": method}, "schema": schema}


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _with_raw(asked: Runnable[Any, AIMessage], parser: Any) -> Runnable[Any, Mapping[str, Any]]:
    """``raw``, ``parsed`` and ``parsing_error``; as ``BaseChatModel.with_structured_output`` has it."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asked) | parsed.with_fallbacks([failed], exception_key="parsing_error")
