"""``BlendLLM``: LlamaIndex's LLM, with the KV of known chunks loaded instead of computed.

Chunks are recognised in the prompt by their content, so stock query engines need no change. Owns
the LlamaIndex side only; the engine does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from blendrag.frameworks.fields import CONFIG
from blendrag.frameworks.shared import context_tokens, to_thread
from blendrag.frameworks.tools import has_tools
from llama_index.llms.blendrag import _results, _tools
from llama_index.llms.blendrag._calls import Asked, Call
from llama_index.llms.blendrag._messages import to_dicts
from llama_index.llms.blendrag._tool_calling import ToolCalling

if TYPE_CHECKING:
    from blendrag.engine import Options


class BlendLLM(ToolCalling):
    """A local Hugging Face causal LM over a blendrag store.

    Messages go through the model's own chat template, or through ``messages_to_prompt`` where there is
    none or it is turned off; a string given to ``complete`` is one user message, or raw text when it is
    ``formatted`` already. ``raw`` of every response (of a stream: of its last) holds ``usage``,
    ``finish_reason`` and, under ``blendrag``, the request's metrics.

    Tools go through the chat template of a model that has a place for them, and only then is
    ``metadata.is_function_calling_model`` true; with others, agents ask in plain text (ReAct),
    structured output is asked for as JSON, and the methods for tools raise :class:`InvalidInputError`.
    What was meant to be a call and cannot be read is in ``additional_kwargs["invalid_tool_calls"]``.
    A :class:`BlendReuseEvent` is emitted for every answer.

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
            is_function_calling_model=has_template and has_tools(engine.resources.tokens),
            model_name=engine.resources.model_name,
        )

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """As in LlamaIndex; names an engine that was given, so that ``from_dict`` asks for it again."""
        given = {} if self.given_engine is None else {"engine": "BlendEngine"}
        return super().to_dict(**kwargs) | given

    def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of ``messages`` as the model reads them, its template's own included."""
        from blendrag.engine.rendering import render

        options, tokens = self.request_options(), self.engine.resources.tokens
        asked = self._asked(self._extend_messages(list(messages)), options)
        return len(tokens.encode_template(render(asked, tokens, options).text))

    # -- whole answers --------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chat_call(messages, kwargs).whole()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._completion_call(prompt, formatted, kwargs).whole()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await (await to_thread(self._chat_call, messages, kwargs)).awhole()

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return await self._completion_call(prompt, formatted, kwargs).awhole()

    # -- answers piece by piece -----------------------------------------------------------------

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chat_call(messages, kwargs).pieces()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self._completion_call(prompt, formatted, kwargs).pieces()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return (await to_thread(self._chat_call, messages, kwargs)).apieces()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return self._completion_call(prompt, formatted, kwargs).apieces()

    # -- inside ---------------------------------------------------------------------------------

    def _chat_call(
        self, messages: Sequence[ChatMessage], overrides: dict[str, Any]
    ) -> Call[ChatResponse]:
        from blendrag.engine.rendering import refuse_silence

        refuse_silence(to_dicts(messages))
        overrides = dict(overrides)
        offer = _tools.Offer.taken_from(overrides)
        if offer is not None:
            overrides["tools"] = offer.tools
        options = self.request_options(**overrides)
        if offer is not None:
            self._check_tools(offer.tools, options)
            options = replace(options, opening=offer.opening(self.engine.resources.tokens))
        return Call(
            self.engine,
            self._asked(messages, options),
            options,
            _results.chat,
            offer,
            active_span_id.get(),
        )

    def _completion_call(
        self, prompt: str, formatted: bool, overrides: dict[str, Any]
    ) -> Call[CompletionResponse]:
        """Text that is formatted already gets no template."""
        if formatted:
            overrides = {"apply_chat_template": False, **overrides}
        elif self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        options = self.request_options(**overrides)
        span_id = active_span_id.get()
        return Call(self.engine, prompt, options, _results.completion, span_id=span_id)

    def _asked(self, messages: Sequence[ChatMessage], options: Options) -> Asked:
        """Messages for the model's template; as LlamaIndex flattens them where none is applied."""
        converted = to_dicts(messages)
        if not converted or (
            options.apply_chat_template and self.engine.resources.tokens.has_template
        ):
            return converted
        assert self.messages_to_prompt is not None  # set when the wrapper was made
        return self.messages_to_prompt(messages)
