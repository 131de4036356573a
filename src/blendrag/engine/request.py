"""What goes into a request and what comes out: prompts, options, the request itself, the answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blendrag import config, tracing
from blendrag.chat.calls import InvalidCall, ToolCall
from blendrag.chat.formats import Format
from blendrag.chat.grammar import AnswerForm
from blendrag.chat.reply import Reply, ReplyStream, take_apart
from blendrag.chat.template_arguments import EFFORT, SWITCHES
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine.explanation import Explanation, Trace
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.fusor.selection import Blending, Schedule, make_policy
from blendrag.metrics import RequestMetrics
from blendrag.option import Elsewhere, refuse_unknown, refuses_unknown
from blendrag.schema.concatenation import FixedPrompt
from blendrag.signatures import shows
from blendrag.store.identity import digest_fields
from blendrag.text.matches import Match
from blendrag.text.passages import FreshText
from blendrag.text.prompt import SegmentedPrompt
from blendrag.text.rendered import Rendered
from blendrag.wording import quoted

Message = Mapping[str, Any]


@dataclass(frozen=True)
class RagPrompt:
    """A user message with known chunks and question. All of it is data, and so is its history."""

    text: str
    chunks: tuple[Match, ...] | None
    """Ascending, disjoint, in characters of ``text``. ``None``: they are recognised, and question and history
    count as in any other conversation."""
    question: tuple[int, int]
    history: tuple[Message, ...] = ()
    """Messages before this one."""
    retrieval_s: float = 0.0
    """Seconds that finding the chunks took, waiting included; a part of ``ttft_s``."""
    opening_s: float = 0.0
    """Seconds of opening the embedder before that; no part of ``ttft_s``."""
    retrieved: tuple[RetrievedChunk, ...] = ()
    """The chunks as they were retrieved, if they were."""


@dataclass(frozen=True)
class SchemaPrompt:
    """A prompt in the markup of Prompt Cache, of a schema that the engine has (:meth:`add_schema`)."""

    pml: str
    """``<prompt schema="…">…</prompt>``"""
    file: str = "<prompt>"
    """Its name in errors."""


Prompt = str | Sequence[Message] | RagPrompt | SchemaPrompt | Rendered


def one_prompt(prompt: Prompt | None, pml: str | None) -> Prompt:
    """The prompt of a call. Raises :class:`InvalidInputError` unless one of the two is given."""
    if (prompt is None) == (pml is None):
        given = "neither a prompt nor pml" if prompt is None else "a prompt and pml"
        raise InvalidInputError(f"{given} given, expected one of them; leave out the other")
    return SchemaPrompt(pml) if pml is not None else prompt  # type: ignore[return-value]


def prompt_chars(prompt: Prompt) -> int:
    """Characters of a prompt, without its template; 0 for a value that is none."""
    if isinstance(prompt, RagPrompt):
        return len(prompt.text) + prompt_chars(prompt.history)
    if isinstance(prompt, SchemaPrompt):
        return len(prompt.pml)
    if isinstance(prompt, str | Rendered):
        return len(prompt if isinstance(prompt, str) else prompt.text)
    contents = (each.get("content") for each in prompt or () if isinstance(each, Mapping))
    return sum(len(content) for content in contents if isinstance(content, str | Sequence))


# -- options --------------------------------------------------------------------------------------

#: The longest answer of a request that names none: it goes on to its end or that of the context.
TO_THE_END = sys.maxsize

#: Settings of a generation config that turn on assisted decoding.
ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_CACHE = ("past_key_values", "cache_implementation", "cache_config", "use_cache")
_OWN = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "streamer",
    "stopping_criteria", "return_dict_in_generate",
)  # fmt: skip
#: Arguments of ``model.generate`` a request may not carry, and why.
REFUSED = {
    **dict.fromkeys(
        ("assistant_model", *ASSISTED), "assisted decoding cannot be combined with blending"
    ),
    **dict.fromkeys(_CACHE, "blending brings its own cache"),
    **dict.fromkeys(_OWN, "the engine sets it itself"),
    "generation_config": "its settings are given one by one, so that each can be looked at",
    "prefill_chunk_size": "a blended prompt is prefilled in one forward",
    "max_length": "use max_new_tokens",
}

#: Hex digits of a scope, of which nobody makes two equal ones.
SCOPE_DIGITS = 32


#: There are too many for a message.
_LISTED = "docs/options.md lists the options of requests"


@refuses_unknown("an option of a request", _LISTED, config.OF_ENGINES)
@dataclass(frozen=True)
class Options:
    """How to answer one request; ``None`` takes the engine's default.

    ``temperature`` 0 or ``None`` decodes greedily; ``top_p`` needs a temperature. ``generate_kwargs`` holds
    more arguments of ``model.generate`` (``num_beams``, ``repetition_penalty``, …); with ``do_sample`` there,
    sampling follows the checkpoint's generation config.

    Raises :class:`InvalidOptionError`, an :class:`InvalidInputError`, for a wrong type or value.
    """

    mode: config.Mode | None = None
    policy: config.Policy | None = None
    schedule: config.Schedule | None = None
    ratio: config.Ratio | None = None
    max_new_tokens: config.MaxNewTokens | None = None
    """More than there is room for is cut to the room, with a note."""
    stop: tuple[str, ...] = ()
    """A single string is one text."""
    temperature: config.Temperature | None = None
    top_p: config.TopP | None = None
    system: config.System | None = None
    """Also for :meth:`BlendEngine.ask` without a chat template. Messages with a system message keep it."""
    prompt_template: config.PromptTemplate | None = None
    """Chunks are encoded after blendrag's own beginning of a prompt, or ``prefix_text``, whatever this is."""
    apply_chat_template: config.ApplyChatTemplate = True
    chat_template_kwargs: config.ChatTemplateKwargs = field(default_factory=dict)
    enable_thinking: config.EnableThinking | None = None
    """Under whatever name the chat template has a switch for it. A note says so if it has none."""
    reasoning_effort: config.ReasoningEffort | None = None
    generate_kwargs: config.GenerateKwargs = field(default_factory=dict)
    timeout_s: config.TimeoutS | None = None
    min_ratio: config.MinRatio | None = None
    seed: config.Seed | None = None
    """Independent of torch's global generators."""
    presence_penalty: config.PresencePenalty | None = None
    frequency_penalty: config.FrequencyPenalty | None = None
    logit_bias: config.LogitBias | None = None
    logprobs: config.Logprobs | None = None
    tools: config.Tools = ()
    """Calls are in :attr:`Answer.tool_calls`."""
    tool_choice: config.ToolChoice | None = None
    """A call that must be made is begun for the model, and its arguments follow the tool's schema."""
    response_format: config.ResponseFormat | None = None
    """See :func:`blendrag.chat.grammar.answer_form`."""
    opening: config.Opening = ""
    """It is appended to the rendered prompt; the answer's text continues it."""
    explain: config.Explain = False
    cache_salt: config.CacheSalt | None = None
    """With a salt, nothing of the prompt is learned or stored, and no learned passage is used."""
    tenant: config.Tenant | None = None
    """What prompts leave are passages that are learned, and exact prefixes; all tenants share the documents
    of the store. ``None`` is a tenant, too."""
    plain_messages: config.PlainMessages | None = None
    """Without effect with ``apply_chat_template=False``."""

    def __post_init__(self) -> None:
        config.check_options(vars(self))
        if self.policy is not None:
            make_policy(self.policy)
        if self.schedule is not None:
            Schedule.parse(self.schedule)
        if self.top_p is not None and self.temperature is None and not self.samples:
            raise InvalidOptionError(
                "top_p",
                f"{self.top_p} without a temperature, expected both, as decoding is greedy without one; "
                "add a temperature, such as 1.0 for the model's own probabilities",
            )
        object.__setattr__(self, "tools", tuple(self.tools or ()))
        object.__setattr__(self, "stop", self._stop_texts())
        for name in self.generate_kwargs:
            if name in REFUSED:
                raise InvalidInputError(f"generate argument {name}: {REFUSED[name]}; leave it out")

    def _stop_texts(self) -> tuple[str, ...]:
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in texts:
            if not isinstance(text, str) or not text:
                held = "an empty text" if text == "" else quoted(text)
                raise InvalidOptionError(
                    "stop",
                    f"holds {held}, expected texts; leave it out to let the model end by itself",
                )
        return texts

    @property
    def scope(self) -> str | None:
        """Where the prompt's passages are learned and found: a digest of the tenant. ``None`` with a salt."""
        if self.cache_salt is not None:
            return None
        named = () if self.tenant is None else (self.tenant.encode("utf-8", "surrogatepass"),)
        return digest_fields([b"tenant", *named])[:SCOPE_DIGITS]

    @property
    def is_private(self) -> bool:
        """Whether what others did must not show: a chunk in memory was used before."""
        return self.cache_salt is not None or self.tenant is not None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """All arguments of the chat template, if it is not known which of them it reads."""
        switch: dict[str, Any] = {}
        if self.enable_thinking is not None:
            switch = dict.fromkeys(SWITCHES, self.enable_thinking)
        if self.reasoning_effort is not None:
            switch[EFFORT] = self.reasoning_effort
        return switch | dict(self.chat_template_kwargs)

    @property
    def samples(self) -> bool:
        return bool(self.generate_kwargs.get("do_sample", self.temperature))


class OptionFields(config.RequestDefaults, total=False):
    """The fields of :class:`Options` as keywords of a call: ``engine.ask(question, max_new_tokens=20)``."""

    stop: config.Stop
    temperature: config.Temperature | None
    top_p: config.TopP | None
    apply_chat_template: config.ApplyChatTemplate
    reasoning_effort: config.ReasoningEffort | None
    generate_kwargs: config.GenerateKwargs
    timeout_s: config.TimeoutS | None
    seed: config.Seed | None
    presence_penalty: config.PresencePenalty | None
    frequency_penalty: config.FrequencyPenalty | None
    logit_bias: config.LogitBias | None
    logprobs: config.Logprobs | None
    tools: config.Tools
    tool_choice: config.ToolChoice | None
    response_format: config.ResponseFormat | None
    opening: config.Opening
    explain: config.Explain
    cache_salt: config.CacheSalt | None
    tenant: config.Tenant | None


#: What engines are given by mistake.
OF_REQUESTS = Elsewhere(
    {*OptionFields.__annotations__} - {*config.RequestDefaults.__annotations__},
    "a request",
    "give it to ask(…), generate(…) or stream(…)",
)

#: What :meth:`BlendEngine.ask` takes besides the options.
_ASK = ("top_k", "filter", "history")

#: Shows every option in the signature of a call.
takes_options = shows(OptionFields, Options())


def with_keywords(options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """``options`` with the keywords of a call, which replace its fields.

    Raises :class:`InvalidInputError` for anything else than options and for a keyword that is none.
    """
    if not isinstance(options, Options | None):
        raise InvalidInputError(
            f"options is {quoted(options)}, expected Options(…); or pass options as keywords, such as "
            "max_new_tokens=20"
        )
    known = *OptionFields.__annotations__, *_ASK
    refuse_unknown(keywords, known, "an option of a request", _LISTED, config.OF_ENGINES)
    return replace(options or Options(), **keywords)


# -- request and answer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What was asked, with every default filled in. Nothing has been computed yet."""

    prompt: SegmentedPrompt
    options: Options
    mode: config.Mode
    blending: Blending
    max_new_tokens: int
    asked_at: float
    """``time.perf_counter()`` when the caller asked."""
    source_of: Mapping[str, str] = field(default_factory=dict)
    """Source of each chunk, by chunk id."""
    notes: tuple[str, ...] = ()
    fresh: FreshText | None = None
    """What may be learned; ``None`` if nothing."""
    opening_s: float = 0.0
    """Seconds of opening the tokenizer for this request."""
    fills_context: bool = False
    """Whether ``max_new_tokens`` is what the context has room for, and more was allowed."""
    sequences: int = 1
    """Sequences that ``generate`` runs: beams or returned sequences."""
    fixed: FixedPrompt | None = None
    """The prompt with fixed positions, if it is that of a schema with ``positions="schema"``."""
    retrieval_s: float = 0.0
    """Seconds of finding its chunks, before it was asked."""
    embedder_opening_s: float = 0.0
    """Seconds of opening the embedder for that."""
    form: Format | None = None
    """How the model writes reasoning and tool calls; ``None`` for a prompt without the chat template."""
    answer_form: AnswerForm | None = None
    begun: str = ""
    """What of the answer the prompt already holds."""
    shared_ends: tuple[int, ...] = ()
    """Where beginnings of the rendered prompt end that later ones may share, in characters."""
    trace_context: Any = field(default_factory=tracing.current, repr=False, compare=False)
    """The trace context of the caller's thread, for spans on the scheduler's."""

    @property
    def may_blend(self) -> bool:
        """Whether the KV of its chunks may be loaded to other positions than it was computed at."""
        return self.mode != "full" and self.fixed is None

    @property
    def end(self) -> int:
        """The position of the first new token."""
        return len(self.prompt.ids) if self.fixed is None else self.fixed.end

    def new_reply(self) -> ReplyStream | None:
        """Takes the answer apart as it grows."""
        if self.form is None:
            return None
        return ReplyStream(self.form, self.options.tools, self.begun)

    def taken_apart(self, text: str) -> Reply:
        """A whole answer."""
        if self.form is None:
            return Reply(text)
        return take_apart(text, self.form, self.options.tools, self.begun)


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer and its log probability under the model, in nats.

    ``token`` is the text that the token added, empty for the first bytes of a character; ``top`` has the most
    likely tokens at its position, most likely first, each as the text it would have added.
    """

    token: str
    id: int
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """An answer with its metrics.

    ``texts``, ``replies`` and ``finish_reasons`` have one entry per returned sequence; ``text`` and
    ``finish_reason`` are the first. Texts are without reasoning and tool calls. A finish reason is ``stop``
    (end token or stop string) or ``length``. ``logprobs``, if requested, has one entry per token, those of
    reasoning and tool calls included.
    """

    text: str
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    metrics: RequestMetrics
    sources: tuple[RetrievedChunk, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    trace: Trace | None = None
    """With ``Options(explain=True)``."""
    replies: tuple[Reply, ...] = ()

    @property
    def finish_reason(self) -> str:
        return self.finish_reasons[0]

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered."""
        return self.replies[0].reasoning if self.replies else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.replies[0].calls if self.replies else ()

    @property
    def invalid_calls(self) -> tuple[InvalidCall, ...]:
        """Calls that could not be read."""
        return self.replies[0].invalid if self.replies else ()

    def explain(self) -> Explanation:
        """What became of each prompt token, why, and when: a page, or an object that a notebook shows.

        Raises :class:`InvalidInputError` unless it was asked with ``Options(explain=True)``.
        """
        if self.trace is None:
            raise InvalidInputError(
                "this answer kept no trace of its tokens; ask again with explain=True"
            )
        return Explanation(self.text, self.sources, self.metrics, self.trace)
