"""``BlendLLM``: text in, text out, with the KV of known chunks loaded instead of computed.

Chunks are recognised in the prompt by their content, so stock chains need no change.

``BaseLLM`` passes prompts on as plain strings and would flatten messages to "Human: …". Here they become
a :class:`RenderedPrompt`, which holds what the engine has rendered, so that it renders a prompt once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import BaseMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from blendrag.frameworks import schema_prompts
from blendrag.frameworks.fields import CONFIG, RequestFields
from blendrag.frameworks.streaming import Piece, astream_pieces, stream_pieces, to_thread
from langchain_blendrag._convert import (
    Message,
    generation_info,
    identifying_params,
    to_dicts,
    token_usage,
)
from langchain_blendrag.prompts import SchemaPromptValue

if TYPE_CHECKING:
    from blendrag.engine import Answer, Options, Prompt
    from blendrag.text.rendered import Rendered

#: Call options that decide how messages become text.
_RENDERING = (
    "apply_chat_template", "chat_template_kwargs", "enable_thinking", "reasoning_effort", "plain_messages",
    "tools", "tool_choice",
)  # fmt: skip


class RenderedPrompt(str):
    """A chat prompt that the engine has rendered with the model's template."""

    rendered: Rendered

    def __new__(cls, rendered: Rendered) -> RenderedPrompt:
        prompt = super().__new__(cls, rendered.text)
        prompt.rendered = rendered
        return prompt

    def __getnewargs__(self) -> tuple[Rendered]:  # type: ignore[override]
        return (self.rendered,)


class TemplatedPromptValue(PromptValue):
    """Messages that ``render``, the model's chat template, makes a string of."""

    messages: list[BaseMessage]
    render: Callable[[Sequence[Message]], Any]
    """Makes what :class:`RenderedPrompt` holds."""

    def to_string(self) -> str:
        return RenderedPrompt(self.render(to_dicts(self.messages)))

    def to_messages(self) -> list[BaseMessage]:
        return list(self.messages)


def engine_prompt(prompt: str) -> Prompt:
    """What the engine is asked: what it has rendered, the modules of ``prompt``, or ``prompt`` itself."""
    if isinstance(prompt, RenderedPrompt):
        return prompt.rendered
    return schema_prompts.from_text(prompt) or prompt


class BlendLLM(RequestFields, BaseLLM):
    """A local Hugging Face causal LM over a blendrag store.

    A string becomes one user message; messages go through the model's chat template. The
    ``generation_info`` of every answer holds ``finish_reason``, ``token_usage`` and, under ``blendrag``,
    the metrics of the request.

    Example:
        ```python
        llm = BlendLLM(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")
        chain = prompt | llm
        ```

    Raises pydantic's ``ValidationError`` for an option that does not exist or is out of range, and
    blendrag's own errors (``blendrag.errors``) from calls.
    """

    model_config = CONFIG

    # -- answering ------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self.request_options(stop, **kwargs)
        answers = self.engine.batch([engine_prompt(prompt) for prompt in prompts], options)
        return self._result(answers)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self.request_options(stop, **kwargs)
        answers = await self.engine.abatch([engine_prompt(p) for p in prompts], options)
        return self._result(answers)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        options = self.request_options(stop, **kwargs)
        for piece in stream_pieces(self.engine, engine_prompt(prompt), options):
            chunk = self._chunk(piece)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        options = self.request_options(stop, **kwargs)
        pieces = astream_pieces(self.engine, engine_prompt(prompt), options)
        async with aclosing(pieces):
            async for piece in pieces:
                chunk = self._chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Like ``BaseLLM``, but with ``return_exceptions`` an error is returned for its own prompt only."""
        config = _one_by_one(inputs, config) if return_exceptions else config
        return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """:meth:`batch`, awaited."""
        config = _one_by_one(inputs, config) if return_exceptions else config
        return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    # -- prompts --------------------------------------------------------------------------------

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        value = super()._convert_input(model_input)
        if not self.apply_chat_template or isinstance(value, TemplatedPromptValue):
            return value
        return self._templated(value, {})

    def _templated(self, value: PromptValue, call: Mapping[str, Any]) -> PromptValue:
        """Messages that go through the model's template instead of becoming "Human: …".

        ``call``: arguments of the call, which ``_convert_input`` does not get.
        """
        if isinstance(value, StringPromptValue | SchemaPromptValue):
            return value
        options = self.request_options(**{name: call[name] for name in _RENDERING if name in call})
        if options.apply_chat_template:
            render = partial(self._render, options=options)
            return TemplatedPromptValue(messages=value.to_messages(), render=render)
        messages = value.to_messages()
        to_dicts(messages)  # raises for empty messages and for content that is not text
        flat = ChatPromptValue(messages=messages)
        return StringPromptValue(text=flat.to_string())

    def _render(self, messages: Sequence[Message], options: Options) -> Rendered:
        return self.engine.render(messages, options)

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """Like ``BaseLLM``; overridden because some chains call it with messages directly."""
        values = [self._templated(p, kwargs) for p in prompts]
        return super().generate_prompt(values, *args, **kwargs)

    async def agenerate_prompt(
        self, prompts: list[PromptValue], *args: Any, **kwargs: Any
    ) -> LLMResult:
        """:meth:`generate_prompt`, with the tokenizer opened off the event loop."""
        await to_thread(self._open)
        values = [self._templated(p, kwargs) for p in prompts]
        return await super().agenerate_prompt(values, *args, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Like ``BaseLLM``, which ignores the call's arguments when it converts messages."""
        prompt = self._templated(super()._convert_input(input), kwargs)
        yield from super().stream(prompt, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        """:meth:`stream`, with the tokenizer opened off the event loop."""
        await to_thread(self._open)
        prompt = self._templated(super()._convert_input(input), kwargs)
        pieces = super().astream(prompt, config, stop=stop, **kwargs)
        async with aclosing(pieces):  # type: ignore[type-var]
            async for text in pieces:
                yield text

    def _open(self) -> None:
        """Open tokenizer and corpus, which a request needs before the model. Loads no weights."""
        _ = self.engine.tokens, self.engine.corpus

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer, without special tokens."""
        return list(self.engine.tokens.encode_text(text))

    # -- results --------------------------------------------------------------------------------

    def _result(self, answers: Sequence[Answer]) -> LLMResult:
        name = self.engine.model_name
        return LLMResult(
            generations=[
                [Generation(text=t, generation_info=generation_info(a, name)) for t in a.texts]
                for a in answers
            ],
            llm_output={"model_name": name, "token_usage": token_usage(answers)},
        )

    def _chunk(self, piece: Piece) -> GenerationChunk:
        if piece.answer is None:
            return GenerationChunk(text=piece.text)
        info = generation_info(piece.answer, self.engine.model_name)
        return GenerationChunk(text=piece.text, generation_info=info)

    # -- identity -------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "blendrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return identifying_params(self)


def _one_by_one(
    inputs: Sequence[Any], config: RunnableConfig | list[RunnableConfig] | None
) -> list[RunnableConfig]:
    """``config`` of each input in batches of one, so that an error affects its own prompt only."""
    configs = get_config_list(config, len(inputs))
    return [{**each, "max_concurrency": 1} for each in configs] if len(inputs) > 1 else configs
