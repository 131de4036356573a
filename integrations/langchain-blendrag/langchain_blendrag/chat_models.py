"""``ChatBlend``: a chat model that loads the KV of known chunks instead of computing it.

Chunks are recognised in the rendered prompt by their content, so stock chains and agents need no change.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, get_buffer_string
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json

from blendrag.chat.forcing import can_force, chosen_tool, refuse_unreadable
from blendrag.chat.lark import schema_of
from blendrag.errors import InvalidInputError
from blendrag.frameworks import schema_prompts
from blendrag.frameworks.fields import CONFIG, RequestFields
from blendrag.frameworks.streaming import Piece, astream_pieces, stream_pieces, to_thread
from blendrag.option import refuse_unknown
from langchain_blendrag._convert import (
    Message,
    generation_info,
    identifying_params,
    to_dicts,
    token_usage,
    usage_metadata,
)
from langchain_blendrag._structured import Method, structured

if TYPE_CHECKING:
    from blendrag.chat.reply import Reply
    from blendrag.engine import Answer, BlendEngine, Options, Prompt


class ChatBlend(RequestFields, BaseChatModel):
    """A local Hugging Face causal LM over a blendrag store, as a chat model.

    Messages and tools go through the model's own chat template. ``usage_metadata`` counts loaded prompt
    tokens as ``cache_read`` and the others as ``cache_creation``. ``response_metadata`` holds
    ``model_name``, ``finish_reason``, ``ttft_s``, ``logprobs`` if requested and, under ``blendrag``, the
    metrics with the outcome of each chunk.

    Example:
        ```python
        llm = ChatBlend(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")
        llm.invoke("What is the town known for?").usage_metadata
        ```

    Raises pydantic's ``ValidationError`` for an option that does not exist or is out of range, and
    blendrag's own errors (``blendrag.errors``) from calls.
    """

    model_config = CONFIG

    streaming: bool = False
    """Whether ``invoke`` streams too, so that callbacks receive each token."""

    # -- answering ------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, options = self._request(messages, stop, **kwargs)
        answer = self.engine.generate(prompt, options)
        return chat_result(answer, self.engine)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, options = await to_thread(self._request, messages, stop, **kwargs)
        answer = await self.engine.agenerate(prompt, options)
        return chat_result(answer, self.engine)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt, options = self._request(messages, stop, **kwargs)
        for piece in stream_pieces(self.engine, prompt, options):
            chunk = answer_chunk(piece, self.engine)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        prompt, options = await to_thread(self._request, messages, stop, **kwargs)
        async with aclosing(astream_pieces(self.engine, prompt, options)) as pieces:
            async for piece in pieces:
                chunk = answer_chunk(piece, self.engine)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _request(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        response_format: Mapping[str, Any] | None = None,
        stream: bool = False,
        may_be_empty: bool = False,
        **call: Any,
    ) -> tuple[Prompt, Options]:
        """Prompt and options for the arguments of a call. Opens the tokenizer if there are tools.

        Raises :class:`InvalidInputError` for arguments that this model does not support.
        """
        choice = chosen_tool(tool_choice, tools or ())
        offered = () if choice == "none" else tuple(tools or ())
        options = self.request_options(
            stop,
            **call,
            tools=offered or None,
            tool_choice=choice if offered else None,
            response_format=response_format,
        )
        if (placed := schema_prompts.from_messages(messages)) is not None:
            return placed, options
        if not options.apply_chat_template:
            return _flattened(messages, offered), options
        converted = to_dicts(messages, may_be_empty)
        if instruction := _instruction(response_format):
            converted = _with_instruction(converted, instruction)
        return tuple(converted), options

    # -- tools and structured output ------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A runnable that offers ``tools`` with every call. Opens the tokenizer.

        ``tool_choice``: ``auto`` (default), ``none``, ``any`` or a tool's name. A required call is
        begun for the model as its template writes calls, and its arguments follow the tool's schema; with
        ``strict``, a schema that cannot be enforced whole is refused. Raises :class:`InvalidInputError` for
        a model whose template does not render tools or writes calls that cannot be read, and for an
        unknown choice.
        """
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if schemas and not self.engine.tokens.has_tools:
            raise InvalidInputError(
                f"tools given ({len(schemas)}) to {self.engine.model_name!r}, whose chat template "
                "does not render tools; use a model whose template does, or leave the tools out"
            )
        if schemas:
            refuse_unreadable(self.engine.tokens, schemas)
        choice = chosen_tool(tool_choice, schemas)
        chosen = {} if choice is None else {"tool_choice": choice}
        return self.bind(tools=schemas, **chosen, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method | None = None,
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | Any]:
        """A runnable that answers with ``schema``: a pydantic class, a TypedDict or a JSON schema.

        ``method``: ``function_calling`` (default if the model's template shows how calls are written),
        ``json_schema`` (the schema is added to the question; default otherwise) or ``json_mode`` (the
        prompt describes the schema already). The model can only answer in JSON, and but for ``json_mode``
        only in the schema; ``strict`` refuses a schema that cannot be enforced whole. An answer that was cut
        or does not follow the schema is an error, or with ``include_raw`` a ``parsing_error``.
        """
        known = ("method", "include_raw", "strict")
        refuse_unknown(kwargs, known, "an option of with_structured_output")
        return structured(self, self._can_force, schema, method, strict, include_raw)

    def _can_force(self) -> bool:
        """Whether the model can be made to call a tool. Opens the tokenizer."""
        if not self.apply_chat_template:
            return False
        tokens = self.engine.tokens
        return tokens.has_tools and can_force(tokens, self.request_options().template_arguments)

    # -- counting -------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer, without special tokens."""
        return list(self.engine.tokens.encode_text(text))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt as the template renders ``messages`` and ``tools``.

        ``messages`` may be a part of a conversation, as ``trim_messages`` counts it.
        """
        if not messages:
            return 0
        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        prompt, options = self._request(messages, None, tools=schemas, may_be_empty=True)
        return len(self.engine.segments(prompt, options).ids)

    # -- identity -------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "chat-blendrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return identifying_params(self)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """How LangSmith identifies a call."""
        options = self.request_options(stop)
        params = LangSmithParams(
            ls_provider="blendrag",
            ls_model_name=kwargs.get("model") or self.engine.model_name,
            ls_model_type="chat",
            ls_max_tokens=kwargs.get("max_new_tokens")
            or kwargs.get("max_tokens")
            or options.max_new_tokens
            or self.engine.settings.max_new_tokens,
        )
        temperature = kwargs.get("temperature", options.temperature)
        if temperature is not None:
            params["ls_temperature"] = temperature
        if options.stop:
            params["ls_stop"] = list(options.stop)
        return params


# -- requests ----------------------------------------------------------------------------------------


def _flattened(messages: Sequence[BaseMessage], tools: Sequence[Any]) -> str:
    if tools:
        raise InvalidInputError(
            f"apply_chat_template=False with tools ({len(tools)}), which a model sees only through its "
            "chat template; leave one of them out"
        )
    to_dicts(messages)  # raises for content that is not text
    return get_buffer_string(messages)


def _instruction(response_format: Mapping[str, Any] | None) -> str:
    """OpenAI's ``response_format`` as an instruction."""
    kind = (response_format or {}).get("type", "text")
    plain = "Answer with one JSON object and nothing else."
    if kind == "json_object":
        return plain
    if kind == "json_schema":
        schema = json.dumps(schema_of(response_format or {}), ensure_ascii=False)
        return f"{plain} It must follow this JSON schema:\n{schema}"
    return ""  # the form is enforced, or refused


def _with_instruction(messages: Sequence[Message], instruction: str) -> list[Message]:
    """``messages`` with ``instruction`` at the end of the user's last message, or as a new message."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": instruction}]
    return [*before, {**last, "content": f"{last['content']}\n\n{instruction}"}]


# -- answers -----------------------------------------------------------------------------------------


def chat_result(answer: Answer, engine: BlendEngine) -> ChatResult:
    """One generation per sequence of ``answer``."""
    name = engine.model_name
    return ChatResult(
        generations=[_generation(reply, answer, engine) for reply in answer.replies],
        llm_output={"model_name": name, "token_usage": token_usage([answer])},
    )


def _generation(parsed: Reply, answer: Answer, engine: BlendEngine) -> ChatGeneration:
    message = AIMessage(
        content=parsed.text,
        additional_kwargs=_reasoning(parsed.reasoning),
        tool_calls=[tool_call(name=c.name, args=c.arguments, id=c.id) for c in parsed.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=c.text, id=None, error=c.error)
            for c in parsed.invalid
        ],
        usage_metadata=usage_metadata(answer),
    )
    return ChatGeneration(message=message, generation_info=_info(answer, parsed, engine))


def _reasoning(text: str) -> dict[str, Any]:
    """As LangChain's other chat models; ``content_blocks`` begin with it."""
    return {"reasoning_content": text} if text else {}


def _info(answer: Answer, parsed: Reply, engine: BlendEngine) -> dict[str, Any]:
    info = generation_info(answer, engine.model_name)
    if parsed.calls and answer.finish_reason == "stop":
        info["finish_reason"] = "tool_calls"
    return {**info, "model_provider": "blendrag"}


def answer_chunk(piece: Piece, engine: BlendEngine) -> ChatGenerationChunk:
    """A piece of a streamed answer; the last one has calls, usage and metrics."""
    thought, answer = _reasoning(piece.reasoning), piece.answer
    if answer is None:
        message = AIMessageChunk(content=piece.text, additional_kwargs=thought)
        return ChatGenerationChunk(message=message)
    parsed = answer.replies[0]
    message = AIMessageChunk(
        content=piece.text,
        additional_kwargs=thought,
        tool_call_chunks=_call_chunks(parsed),
        usage_metadata=usage_metadata(answer),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info=_info(answer, parsed, engine))


def _call_chunks(parsed: Reply) -> list[Any]:
    """One chunk per complete call, then the calls that cannot be parsed."""
    calls = [
        tool_call_chunk(
            name=call.name,
            args=json.dumps(call.arguments, ensure_ascii=False),
            id=call.id,
            index=index,
        )
        for index, call in enumerate(parsed.calls)
    ]
    for index, wrong in enumerate(parsed.invalid, len(calls)):
        calls.append(tool_call_chunk(name=None, args=_unreadable(wrong.text), id=None, index=index))
    return calls


def _unreadable(text: str) -> str:
    """``text``, quoted if LangChain would otherwise repair it and call a tool without a name."""
    try:
        return json.dumps(text) if isinstance(parse_partial_json(text), dict) else text
    except ValueError:
        return text
