"""``ChatBlend``: a chat model that loads the KV of known chunks instead of computing it.

Chunks are recognised in the rendered prompt by their content, so stock chains and agents need no
change. Owns the LangChain side only; the engine does the work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import CONFIG, RequestFields
from blendrag.frameworks.shared import agenerate, astream_pieces, stream_pieces, to_thread
from blendrag.frameworks.tool_choice import chosen_tool
from blendrag.frameworks.tools import has_tools
from langchain_blendrag._identity import identifying_params
from langchain_blendrag._replies import Reply, chat_result
from langchain_blendrag._requests import ChatRequest, make_request
from langchain_blendrag._structured import Method, structured


class ChatBlend(RequestFields, BaseChatModel):
    """A local Hugging Face causal LM over a blendrag store, as a chat model.

    Messages go through the model's own chat template, once; tools too, where it has a place for them.
    ``usage_metadata`` counts loaded prompt tokens as ``cache_read`` and the others as
    ``cache_creation``. ``response_metadata`` holds ``model_name``, ``finish_reason``, ``ttft_s``,
    ``logprobs`` where asked for and, under ``blendrag``, what became of each chunk.

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
    """Whether ``invoke`` streams, too, so that callbacks hear of each token."""

    # -- answering ------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        answer = self.engine.generate(request.prompt, request.options)
        return chat_result(answer, request, self.engine)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = await to_thread(self._request, messages, stop, kwargs)
        answer = await agenerate(self.engine, request.prompt, request.options)
        return chat_result(answer, request, self.engine)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(messages, stop, kwargs)
        reply = Reply(request, self.engine)
        for piece in stream_pieces(self.engine, request.prompt, request.options):
            for chunk in reply.chunks(piece):
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
        request = await to_thread(self._request, messages, stop, kwargs)
        reply = Reply(request, self.engine)
        async with aclosing(astream_pieces(self.engine, request.prompt, request.options)) as pieces:
            async for piece in pieces:
                for chunk in reply.chunks(piece):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _request(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, call: dict[str, Any]
    ) -> ChatRequest:
        call = {name: value for name, value in call.items() if name != "stream"}
        return make_request(self, messages, stop, **call)

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

        ``tool_choice``: ``auto`` (default), ``none``, ``any`` or a tool's name; a call that must be
        made is begun for the model in its template's own words. ``strict`` goes into the schemas, and
        no further: tokens are not constrained. Raises :class:`InvalidInputError` for a model whose
        template has no place for tools, and for a choice that is not among them.
        """
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if schemas and not has_tools(self.engine.resources.tokens):
            raise InvalidInputError(
                f"tools given ({len(schemas)}) to {self.engine.resources.model_name!r}, whose chat template "
                "has no place for tools; take a model with one, or leave the tools out"
            )
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

        ``method``: ``function_calling`` (default where the model's template has tools),
        ``json_schema`` (the schema is put behind the question; default elsewhere), ``json_mode`` (the
        prompt describes it already). With ``include_raw``, what cannot be parsed is no error.
        """
        if kwargs:
            raise InvalidInputError(
                f"{', '.join(sorted(kwargs))}: not an option of with_structured_output; expected "
                "method, include_raw, strict"
            )
        return structured(self, schema, method, strict, include_raw)

    # -- counting -------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer, nothing added."""
        return list(self.engine.resources.tokens.encode_text(text))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the whole prompt, as the template renders ``messages`` and ``tools``."""
        from blendrag.engine.rendering import render

        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        request = make_request(self, messages, None, tools=schemas)
        tokens = self.engine.resources.tokens
        return len(tokens.encode_template(render(request.prompt, tokens, request.options).text))

    # -- identity -------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "chat-blendrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return identifying_params(self)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """What LangSmith knows a call by."""
        options = self.request_options(stop)
        params = LangSmithParams(
            ls_provider="blendrag",
            ls_model_name=kwargs.get("model") or self.engine.resources.model_name,
            ls_model_type="chat",
            ls_max_tokens=kwargs.get("max_tokens")
            or options.max_new_tokens
            or self.engine.settings.max_new_tokens,
        )
        temperature = kwargs.get("temperature", options.temperature)
        if temperature is not None:
            params["ls_temperature"] = temperature
        if options.stop:
            params["ls_stop"] = list(options.stop)
        return params
