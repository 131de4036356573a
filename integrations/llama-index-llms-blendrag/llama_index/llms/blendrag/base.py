"""``BlendLLM``: LlamaIndex's LLM, with the KV of known chunks loaded instead of computed.

Chunks are recognised in the prompt by their content, so stock query engines need no change. Owns
the LlamaIndex side only; the engine does the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM

from blendrag.errors import InvalidInputError
from blendrag.plugs.fields import CONFIG, RequestFields
from blendrag.plugs.shared import agenerate, astream_pieces, context_tokens, stream_pieces
from llama_index.llms.blendrag import _results
from llama_index.llms.blendrag._messages import Message, to_dicts

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

    from blendrag.engine import Answer, Options

R = TypeVar("R", ChatResponse, CompletionResponse)
Respond = Callable[[str, str | None, dict[str, Any] | None], R]
Asked = str | list[Message]


class BlendLLM(RequestFields, FunctionCallingLLM):
    """A local Hugging Face causal LM over a blendrag store.

    Messages go through the model's own chat template, or through ``messages_to_prompt`` where there is
    none or it is turned off; a string given to ``complete`` is one user message, or raw text when it is
    ``formatted`` already. ``raw`` of every response (of a stream: of its last) holds ``usage``,
    ``finish_reason`` and, under ``blendrag``, the request's metrics.

    Tools are not supported: ``metadata`` says so, agents then ask in plain text (ReAct), and the
    methods for tools raise :class:`InvalidInputError`.

    Example:
        ```python
        llm = BlendLLM(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")
        engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
        ```

    Raises pydantic's ``ValidationError`` for an option that does not exist or is out of range, and
    blendrag's own errors (``blendrag.errors``) from calls.
    """

    model_config = CONFIG

    @classmethod
    def class_name(cls) -> str:
        return "BlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """True figures of the model, without its weights: LlamaIndex asks on the event loop."""
        engine = self.engine
        has_template = self.apply_chat_template and engine.resources.tokens.has_template
        return LLMMetadata(
            context_window=context_tokens(engine),
            num_output=self.max_tokens or engine.settings.max_new_tokens,
            is_chat_model=has_template,
            is_function_calling_model=False,
            model_name=engine.resources.model_name,
        )

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """As in LlamaIndex; names an engine that was given, so that ``from_dict`` asks for it again."""
        given = {} if self.given_engine is None else {"engine": "BlendEngine"}
        return super().to_dict(**kwargs) | given

    # -- whole answers --------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        options = self.request_options(**kwargs)
        return self._whole(self._asked(messages, options), options, _results.chat)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        options = self._completion_options(formatted, kwargs)
        return self._whole(self._completed(prompt, formatted), options, _results.completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        options = self.request_options(**kwargs)
        prompt = await asyncio.to_thread(self._asked, messages, options)
        answer = await agenerate(self.engine, prompt, options)
        return _results.chat(answer.text, None, self._raw(answer))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        options = self._completion_options(formatted, kwargs)
        answer = await agenerate(self.engine, self._completed(prompt, formatted), options)
        return _results.completion(answer.text, None, self._raw(answer))

    # -- answers piece by piece -----------------------------------------------------------------

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        options = self.request_options(**kwargs)
        return self._pieces(self._asked(messages, options), options, _results.chat)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        options = self._completion_options(formatted, kwargs)
        return self._pieces(self._completed(prompt, formatted), options, _results.completion)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        options = self.request_options(**kwargs)
        prompt = await asyncio.to_thread(self._asked, messages, options)
        return self._apieces(prompt, options, _results.chat)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        options = self._completion_options(formatted, kwargs)
        return self._apieces(self._completed(prompt, formatted), options, _results.completion)

    # -- tools ----------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        raise _no_tools([tool.metadata.get_name() for tool in tools])

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[Any]:
        raise _no_tools([])

    # -- inside ---------------------------------------------------------------------------------

    def _asked(self, messages: Sequence[ChatMessage], options: Options) -> Asked:
        """Messages for the model's template; as LlamaIndex flattens them where none is applied."""
        converted = to_dicts(messages)
        if not converted or (
            options.apply_chat_template and self.engine.resources.tokens.has_template
        ):
            return converted
        assert self.messages_to_prompt is not None  # set when the wrapper was made
        return self.messages_to_prompt(messages)

    def _completed(self, prompt: str, formatted: bool) -> str:
        if formatted or self.completion_to_prompt is None:
            return prompt
        return self.completion_to_prompt(prompt)

    def _completion_options(self, formatted: bool, overrides: dict[str, Any]) -> Options:
        """Options of a completion: text that is formatted already gets no template."""
        if formatted:
            overrides = {"apply_chat_template": False, **overrides}
        return self.request_options(**overrides)

    def _whole(self, prompt: Asked, options: Options, respond: Respond[R]) -> R:
        answer = self.engine.generate(prompt, options)
        return respond(answer.text, None, self._raw(answer))

    def _pieces(
        self, prompt: Asked, options: Options, respond: Respond[R]
    ) -> Generator[R, None, None]:
        text = ""
        for piece in stream_pieces(self.engine, prompt, options):
            text += piece.text
            yield respond(text, piece.text, self._raw(piece.answer))

    async def _apieces(
        self, prompt: Asked, options: Options, respond: Respond[R]
    ) -> AsyncGenerator[R, None]:
        text = ""
        async with aclosing(astream_pieces(self.engine, prompt, options)) as pieces:
            async for piece in pieces:
                text += piece.text
                yield respond(text, piece.text, self._raw(piece.answer))

    def _raw(self, answer: Answer | None) -> dict[str, Any] | None:
        if answer is None:
            return None
        return _results.raw(answer, self.engine.resources.model_name)


def _no_tools(names: Sequence[str | None]) -> InvalidInputError:
    offered = f" ({', '.join(str(name) for name in names)})" if names else ""
    return InvalidInputError(
        f"BlendLLM does not call tools{offered}; use a ReActAgent, which asks for them in plain text"
    )
