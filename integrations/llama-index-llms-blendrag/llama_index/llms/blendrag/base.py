"""``BlendLLM``: LlamaIndex's LLM, with the KV of known chunks loaded instead of computed.

Chunks are recognised in the prompt by their content, so stock query engines need no change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from pydantic import BaseModel

from blendrag.chat.calls import tool_names
from blendrag.chat.forcing import can_force, chosen_tool, refuse_unreadable
from blendrag.errors import InvalidInputError
from blendrag.frameworks import schema_prompts
from blendrag.frameworks.fields import CONFIG, RequestFields
from blendrag.frameworks.streaming import Piece, astream_pieces, stream_pieces, to_thread
from llama_index.llms.blendrag import _convert, events
from llama_index.llms.blendrag._convert import to_dicts
from llama_index.llms.blendrag._errors import never_empty

if TYPE_CHECKING:
    from typing import TypeAlias

    from llama_index.core.chat_engine.types import AgentChatResponse
    from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
    from llama_index.core.tools.types import BaseTool
    from llama_index.core.types import TokenAsyncGen, TokenGen

    from blendrag.engine import Answer, BlendEngine, Options, SchemaPrompt

    #: What the engine is asked: text, messages for the chat template, or the modules of a schema.
    Asked: TypeAlias = str | list[dict[str, Any]] | SchemaPrompt

R = TypeVar("R", ChatResponse, CompletionResponse)
Model = TypeVar("Model", bound=BaseModel)
#: A function schema in OpenAI's form.
Spec = Mapping[str, Any]


class BlendLLM(RequestFields, FunctionCallingLLM):
    """A local Hugging Face causal LM over a blendrag store.

    Messages go through the model's own chat template, or through ``messages_to_prompt`` if there is none
    or it is turned off. A string given to ``complete`` is one user message, or raw text if ``formatted``.
    ``raw`` of every response (in a stream: of the last) holds ``usage``, ``finish_reason`` and, under
    ``blendrag``, the metrics of the request. A :class:`BlendReuseEvent` is emitted for every answer.

    If the model's chat template renders tools and shows how they are called,
    ``metadata.is_function_calling_model`` is true. With other
    models, agents ask in plain text (ReAct), structured output is requested as JSON, and the methods for
    tools raise :class:`InvalidInputError`. Calls that cannot be parsed are in
    ``additional_kwargs["invalid_tool_calls"]``.

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
        """Facts of the model. Loads no weights, because LlamaIndex asks on the event loop."""
        engine = self.engine
        has_template = self.apply_chat_template and engine.tokens.has_template
        context = engine.context_tokens
        longest = self.max_new_tokens or engine.settings.max_new_tokens or DEFAULT_NUM_OUTPUTS
        return LLMMetadata(
            context_window=context,
            # what prompts leave free: an answer is cut to its room, and prompts need some, too
            num_output=min(longest, context // 2),
            is_chat_model=has_template,
            is_function_calling_model=has_template and self._calls_tools,
            model_name=engine.model_name,
        )

    @property
    def _calls_tools(self) -> bool:
        tokens = self.engine.tokens
        return tokens.has_tools and can_force(tokens, self.request_options().template_arguments)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Like LlamaIndex; records that an engine was given, so that ``from_dict`` asks for it again."""
        given = {} if self.given_engine is None else {"engine": "BlendEngine"}
        return super().to_dict(**kwargs) | given

    def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of ``messages``, including those of the chat template."""
        options = self.request_options()
        asked = self._asked(self._extend_messages(list(messages)), options)
        return len(self.engine.segments(asked, options).ids)

    # -- answers --------------------------------------------------------------------------------

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

    # -- streamed answers -----------------------------------------------------------------------

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

    # -- tools ----------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of :meth:`chat`. Raises :class:`InvalidInputError` for a model without tools."""
        specs = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        if specs:
            self._check_tools(specs, self.request_options())
        messages = list(chat_history or ())
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        if specs:
            # LlamaIndex requires calls by default: if a template cannot force them, the model chooses
            is_forced = tool_required and self._calls_tools
            if is_forced and not tool_choice and not allow_parallel_tool_calls and len(tools) == 1:
                tool_choice = tools[0].metadata.name  # which ends with one call
            kwargs |= {
                "tools": specs,
                "tool_choice": tool_choice or ("any" if is_forced else None),
                "parallel_tool_calls": allow_parallel_tool_calls,
            }
        return {"messages": messages, **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response. Raises :class:`InvalidInputError` if there are none."""
        blocks = [b for b in response.message.blocks if isinstance(b, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            invalid = response.additional_kwargs.get("invalid_tool_calls") or ()
            why = f" ({invalid[0]['error']})" if invalid else ""
            if (response.raw or {}).get("finish_reason") == "length":
                raise InvalidInputError(
                    "the answer was cut before a call of a tool was complete; set a larger max_new_tokens, "
                    "or bound texts and lists in the schema"
                )
            raise InvalidInputError(
                f"the model called no tool{why} but answered {(response.message.content or '')[:80]!r}, "
                "expected a call; ask with tool_required=True, or pass error_on_no_tool_call=False"
            )
        return [
            ToolSelection(
                tool_id=block.tool_call_id or block.tool_name,
                tool_name=block.tool_name,
                tool_kwargs=_convert.arguments(block),
            )
            for block in blocks
        ]

    def predict_and_call(
        self,
        tools: Sequence[BaseTool],
        *args: Any,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """Like LlamaIndex: a model whose template does not render tools is asked in plain text (ReAct).

        Raises :class:`InvalidInputError` if there are no tools, or if none was called unless
        ``error_on_no_tool_call=False``.
        """
        kwargs = self._asking(tools, kwargs) | {"error_on_no_tool_call": error_on_no_tool_call}
        response = super().predict_and_call(tools, *args, **kwargs)
        return _called(response, tools) if error_on_no_tool_call else response

    async def apredict_and_call(
        self,
        tools: Sequence[BaseTool],
        *args: Any,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """:meth:`predict_and_call`, awaited."""
        kwargs = self._asking(tools, kwargs) | {"error_on_no_tool_call": error_on_no_tool_call}
        response = await super().apredict_and_call(tools, *args, **kwargs)
        return _called(response, tools) if error_on_no_tool_call else response

    # -- what synthesizers and query engines call -----------------------------------------------

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Like LlamaIndex. Errors of blendrag are raised through query engines, never an empty answer."""
        with never_empty():
            return super().predict(prompt, **prompt_args)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        with never_empty():
            return await super().apredict(prompt, **prompt_args)

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        with never_empty():
            return _raising(super().stream(prompt, **prompt_args))

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        with never_empty():
            return _araising(await super().astream(prompt, **prompt_args))

    # -- structured output ----------------------------------------------------------------------

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Like LlamaIndex. A model that calls no tools can only answer in the schema of ``output_cls``."""
        llm_kwargs = self._formed(output_cls, llm_kwargs)
        with never_empty():
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        llm_kwargs = self._formed(output_cls, llm_kwargs)
        with never_empty():
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        llm_kwargs = self._formed(output_cls, llm_kwargs)
        pieces = super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        return _raising(pieces)

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        llm_kwargs = self._formed(output_cls, llm_kwargs)
        with never_empty():
            pieces = await super().astream_structured_predict(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
        return _araising(pieces)

    def _formed(self, output_cls: type[BaseModel], given: dict[str, Any] | None) -> dict[str, Any]:
        if self.metadata.is_function_calling_model:
            return given or {}
        # pydantic checks what the form does not enforce
        schema = {"schema": output_cls.model_json_schema(), "strict": False}
        form = {"type": "json_schema", "json_schema": schema}
        return {"response_format": form, **(given or {})}

    # -- requests -------------------------------------------------------------------------------

    def _chat_call(
        self, messages: Sequence[ChatMessage], overrides: dict[str, Any]
    ) -> Call[ChatResponse]:
        from blendrag.engine.rendering import require_text

        require_text(to_dicts(messages))
        overrides = dict(overrides)
        offer = Offer.taken_from(overrides)
        if offer is not None:
            overrides |= {"tools": offer.tools, "tool_choice": offer.choice}
        options = self.request_options(**overrides)
        if offer is not None:
            self._check_tools(offer.tools, options)
        return Call(
            self.engine,
            self._asked(messages, options),
            options,
            _convert.chat,
            offer,
            active_span_id.get(),
        )

    def _completion_call(
        self, prompt: str, formatted: bool, overrides: dict[str, Any]
    ) -> Call[CompletionResponse]:
        """Text that is ``formatted`` already gets no template."""
        if formatted:
            overrides = {"apply_chat_template": False, **overrides}
        elif self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        options = self.request_options(**overrides)
        span_id = active_span_id.get()
        asked = schema_prompts.from_text(prompt) or prompt
        return Call(self.engine, asked, options, _convert.completion, span_id=span_id)

    def _asked(self, messages: Sequence[ChatMessage], options: Options) -> Asked:
        """Messages for the model's template, or flattened by LlamaIndex if none is applied."""
        if (placed := schema_prompts.from_messages(messages)) is not None:
            return placed
        converted = to_dicts(messages)
        if not converted or (options.apply_chat_template and self.engine.tokens.has_template):
            return converted
        assert self.messages_to_prompt is not None  # set when the wrapper was created
        return self.messages_to_prompt(messages)

    def _asking(self, tools: Sequence[BaseTool], given: dict[str, Any]) -> dict[str, Any]:
        """``given``, with a formatter and a parser for asking in plain text.

        Without them LlamaIndex (up to 0.14.25) passes ``None`` to its agent, which refuses it.
        """
        if not tools:
            raise InvalidInputError(
                "there are no tools to call, expected one or more; use chat instead"
            )
        if self.metadata.is_function_calling_model:
            return given
        from llama_index.core.agent.react import ReActChatFormatter, ReActOutputParser

        plain = {"react_chat_formatter": ReActChatFormatter(), "output_parser": ReActOutputParser()}
        return plain | {name: value for name, value in given.items() if value is not None}

    def _check_tools(self, specs: Sequence[Spec], options: Options) -> None:
        given = ", ".join(tool_names(specs))
        if not options.apply_chat_template:
            raise InvalidInputError(
                f"apply_chat_template=False with tools ({given}), which a model sees only through its "
                "template; leave one of them out"
            )
        tokens = self.engine.tokens
        if not tokens.has_tools:
            raise InvalidInputError(
                f"the chat template of {self.engine.model_name!r} takes no tools ({given}); use a "
                "ReActAgent, which asks for them in plain text"
            )
        refuse_unreadable(tokens, specs)


@dataclass(frozen=True)
class Offer:
    """The tools of one request, and which must be called."""

    tools: tuple[Spec, ...]
    choice: str | None = None
    """``auto``, ``any`` or a tool's name."""
    parallel: bool = True
    """Whether an answer may call more than one."""

    @classmethod
    def taken_from(cls, call_options: dict[str, Any]) -> Offer | None:
        """Remove the offer from a call's options; ``None`` if there is none."""
        tools = tuple(call_options.pop("tools", None) or ())
        choice = chosen_tool(call_options.pop("tool_choice", None), tools)
        parallel = call_options.pop("parallel_tool_calls", True)
        return cls(tools, choice, parallel is not False) if tools and choice != "none" else None


@dataclass(frozen=True)
class Call(Generic[R]):
    """One request to the engine, whole or streamed, and the form of its response."""

    engine: BlendEngine
    prompt: Asked
    options: Options
    respond: Callable[..., R]
    """:func:`_convert.chat` or :func:`_convert.completion`."""
    offer: Offer | None = None
    """Tools that the answer may call."""
    span_id: str | None = None

    def whole(self) -> R:
        return self._response(self.engine.generate(self.prompt, self.options))

    async def awhole(self) -> R:
        return self._response(await self.engine.agenerate(self.prompt, self.options))

    def pieces(self) -> Generator[R, None, None]:
        """A stream whose request is checked here: some of LlamaIndex's threads lose later errors."""
        return self._pieces(stream_pieces(self.engine, self.prompt, self.options))

    def _pieces(self, pieces: Iterator[Piece]) -> Generator[R, None, None]:
        text = ""
        for piece in pieces:
            text += piece.text
            yield self._piece(piece, text)

    async def apieces(self) -> AsyncGenerator[R, None]:
        text = ""
        async with aclosing(astream_pieces(self.engine, self.prompt, self.options)) as pieces:
            async for piece in pieces:
                text += piece.text
                yield self._piece(piece, text)

    def _piece(self, piece: Piece, text: str) -> R:
        """``text``: all that was streamed up to now."""
        if piece.answer is not None:
            return self._response(piece.answer, piece.text)
        # where LlamaIndex's agents look for it
        thought = {"thinking_delta": piece.reasoning} if piece.reasoning else {}
        return self.respond(text, piece.text, additional_kwargs=thought)

    def _response(self, answer: Answer, delta: str | None = None) -> R:
        """The whole answer; at the end of a stream, ``delta`` is its last piece."""
        name = self.engine.model_name
        events.emit_reuse(answer, name, self.span_id)
        reply = answer.replies[0]
        if self.offer is not None and not self.offer.parallel:
            reply = replace(reply, calls=reply.calls[:1])
        about: dict[str, Any] = {
            "raw": _convert.raw(answer, name),
            "logprobs": _convert.logprobs(answer),
        }
        if reply.calls and answer.finish_reason == "stop":
            about["raw"]["finish_reason"] = "tool_calls"
        return self.respond(reply, delta, **about)


def _called(response: AgentChatResponse, tools: Sequence[BaseTool]) -> AgentChatResponse:
    """``response``, unless it is empty: LlamaIndex's form of a plain text answer without calls."""
    if response.sources or response.response:
        return response
    names = ", ".join(str(tool.metadata.name) for tool in tools)
    raise InvalidInputError(
        f"the model called no tool ({names}) when asked in plain text, expected a call; ask for it more "
        "clearly, or pass error_on_no_tool_call=False"
    )


def _raising(pieces: Iterator[Any]) -> Generator[Any, None, None]:
    with never_empty():
        yield from pieces


async def _araising(pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    with never_empty():
        async for piece in pieces:
            yield piece
