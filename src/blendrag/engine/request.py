"""What goes into a request and what comes out: prompts, options, the request itself, the answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypedDict, get_args

from blendrag import tracing
from blendrag.chat.calls import InvalidCall, ToolCall
from blendrag.chat.formats import Format
from blendrag.chat.grammar import AnswerForm
from blendrag.chat.reply import Reply, ReplyStream, take_apart
from blendrag.chat.template_arguments import EFFORT, SWITCHES
from blendrag.config import AUTO, Mode, Ratio
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine.explanation import Explanation, Trace
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.fusor.selection import Schedule, SelectionPolicy, make_policy
from blendrag.metrics import RequestMetrics
from blendrag.schema.concatenation import PlacedPrompt
from blendrag.signatures import shows
from blendrag.store.identity import digest_fields
from blendrag.text.matches import Match
from blendrag.text.passages import FreshText
from blendrag.text.prompt import SegmentedPrompt
from blendrag.wording import quoted

Message = Mapping[str, Any]
Span = tuple[int, int]


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
    retrieved: tuple[RetrievedChunk, ...] = ()
    """The chunks as they were retrieved, if they were."""


@dataclass(frozen=True)
class SchemaPrompt:
    """A prompt in the markup of Prompt Cache, of a schema that the engine has (:meth:`add_schema`)."""

    pml: str
    """``<prompt schema="…">…</prompt>``"""
    file: str = "<prompt>"
    """Its name in errors."""


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt, which is not rendered again. Spans are in characters of ``text``."""

    text: str
    contents: tuple[Span, ...] | None = None
    """Contents of messages, ascending and disjoint; ``None`` if unknown."""
    turn: Span | None = None
    """Content of the last user message, if known."""
    chunks: tuple[Match, ...] | None = None
    """The chunks, if they are known. Then all other text in ``contents`` is tokenised as plain text."""
    plain: tuple[Span, ...] = ()
    """Data that looks like control tokens; ascending and disjoint."""
    replies: tuple[Span, ...] = ()
    """Contents that the model wrote."""
    notes: tuple[str, ...] = ()

    def shared_ends(self, is_begun: bool) -> tuple[int, ...]:
        """Where beginnings of the text end that later prompts may have, ascending: the system message, the
        earlier turns and, if the template begins the answer (``is_begun``), which it may not repeat, the last
        message."""
        contents, turn = self.contents or (), self.turn
        if not contents or turn is None:
            return ()
        ends = {contents[-1][1]} if is_begun else set()
        if len(contents) > 1 and contents[1] not in self.replies and contents[0][1] <= turn[0]:
            ends.add(contents[1][0])
        if len(contents) > 2:
            ends.add(turn[0])
        return tuple(sorted(ends))


Prompt = str | Sequence[Message] | RagPrompt | SchemaPrompt | Rendered


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

MODES: tuple[Mode, ...] = get_args(Mode)
#: Largest number of alternatives per token, as in OpenAI's API.
MAX_LOGPROBS = 20

#: Hex digits of a scope, of which nobody makes two equal ones.
SCOPE_DIGITS = 32

#: Types of options, and their names in errors. numpy's numbers are accepted, too.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "max_new_tokens": (Integral, "a whole number"),
    "temperature": (Real, "a number"),
    "top_p": (Real, "a number"),
    "timeout_s": (Real, "a number of seconds"),
    "seed": (Integral, "a whole number"),
    "logprobs": (Integral, "a whole number"),
    "stop": ((str, list, tuple, set, frozenset), "a text or a list of texts"),
    "chat_template_kwargs": (Mapping, "a dictionary"),
    "generate_kwargs": (Mapping, "a dictionary"),
    "apply_chat_template": (bool, "True or False"),
    "plain_messages": (bool, "True or False"),
    "explain": (bool, "True or False"),
    "cache_salt": (str, "a text"),
    "tenant": (str, "a text"),
    "response_format": (Mapping, "a dictionary"),
    "tool_choice": ((str, bool, Mapping), "auto, none, any or a tool's name"),
    "enable_thinking": (bool, "True or False"),
    "reasoning_effort": (str, "a text such as low"),
    "presence_penalty": (Real, "a number"),
    "frequency_penalty": (Real, "a number"),
    "logit_bias": (Mapping, "a dictionary of token ids and numbers"),
}


def _is_share(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= value <= 1  # type: ignore[operator]


def _are_biases(value: Any) -> bool:
    return all(
        isinstance(token, Integral) and isinstance(bias, Real) and abs(float(bias)) <= 100
        for token, bias in value.items()
    )


#: Which values of an option are accepted, and what errors say of others.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (MODES.__contains__, f"is not one of {', '.join(MODES)}"),
    "ratio": (lambda v: v == AUTO or _is_share(v), f"must be a number in [0, 1] or {AUTO!r}"),
    "min_ratio": (_is_share, "must be a number in [0, 1]"),
    "max_new_tokens": (lambda v: v >= 1, "is not 1 or more"),
    # logits divided by less are infinite
    "temperature": (lambda v: v == 0 or v >= 1e-30, "must be 0, or 1e-30 or more"),
    "top_p": (lambda v: 0.0 < v <= 1.0, "must be a number in (0, 1]"),
    "timeout_s": (lambda v: v > 0, "must be above 0; leave it out for no limit"),
    "seed": (lambda v: -(2**63) <= v < 2**64, "is not a 64-bit integer"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "must be a number in [-2, 2]"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "must be a number in [-2, 2]"),
    "logit_bias": (_are_biases, "must map token ids to numbers in [-100, 100]"),
    "logprobs": (lambda v: 0 <= v <= MAX_LOGPROBS, f"must be a number in [0, {MAX_LOGPROBS}]"),
}


def _is_nan(value: Any) -> bool:
    return isinstance(value, Real) and value != value  # math.isnan refuses huge integers


def _shown(value: Any) -> str:
    return "nan" if _is_nan(value) else f"{quoted(value, 60)} ({type(value).__name__})"


@dataclass(frozen=True)
class Options:
    """How to answer one request; ``None`` takes the engine's default.

    ``temperature`` 0 or ``None`` decodes greedily; ``top_p`` needs a temperature. ``generate_kwargs`` holds
    more arguments of ``model.generate`` (``num_beams``, ``repetition_penalty``, …); with ``do_sample`` there,
    sampling follows the checkpoint's generation config.

    Raises :class:`InvalidOptionError` (an :class:`InvalidInputError`) for a value of the wrong type or out of
    range.
    """

    mode: Mode | None = None
    policy: str | None = None
    schedule: str | None = None
    ratio: Ratio | None = None
    """In [0, 1]; with ``auto`` the loading controller chooses it, and what is loaded."""
    max_new_tokens: int | None = None
    """Longest answer; ``None``, if the engine has no default: to its end or that of the context. More than
    there is room for is cut to the room, with a note."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; a single string is one text."""
    temperature: float | None = None
    top_p: float | None = None
    apply_chat_template: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, by the names that it reads."""
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers, under whatever name its chat template has a switch for it;
    ``None`` leaves it to the template. A note says so if it has none."""
    reasoning_effort: str | None = None
    """How much the model thinks, for templates that read it (``low``, ``medium``, ``high``); ``none`` is
    ``enable_thinking=False``."""
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    """Seconds for the whole answer, including the time spent waiting for other requests."""
    min_ratio: float | None = None
    """In [0, 1]: the smallest ratio that ``auto`` may choose."""
    seed: int | None = None
    """Makes sampling repeatable, independently of torch's global generators."""
    presence_penalty: float | None = None
    """In [-2, 2]: subtracted from the logits of all tokens that the answer has, as at OpenAI."""
    frequency_penalty: float | None = None
    """In [-2, 2]: subtracted once for each time that the answer has the token."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens, in [-100, 100]."""
    logprobs: int | None = None
    """``None``: none; 0: of the chosen tokens; k: also of the k most likely tokens at each position."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas in OpenAI's format, for the chat template. Calls are in :attr:`Answer.tool_calls`."""
    tool_choice: str | bool | Mapping[str, Any] | None = None
    """``auto`` (default), ``none``, ``any`` (``required``) or a tool's name, also in OpenAI's nesting. A call
    that must be made is begun for the model, and its arguments follow the tool's schema."""
    response_format: Mapping[str, Any] | None = None
    """The form that the answer must have, as OpenAI and vLLM write it
    (:func:`blendrag.chat.grammar.answer_form`); ``None``: any text."""
    opening: str = ""
    """Beginning of the answer, appended to the rendered prompt; the answer's text continues it."""
    explain: bool = False
    """Keep what :meth:`Answer.explain` shows: the state of each prompt token and the timeline."""
    cache_salt: str | None = None
    """Prompts share exact prefixes only with prompts of the same salt. With a salt, nothing of the prompt is
    learned or stored, and no learned passage is used."""
    tenant: str | None = None
    """Whose request it is. What prompts leave (passages that are learned, exact prefixes) is used only for
    requests of the same tenant; all share the documents of the store. ``None`` is a tenant, too."""
    plain_messages: bool | None = None
    """Whether what looks like a control token in system and user messages is text, as in all other messages.
    Without effect with ``apply_chat_template=False``."""

    def __post_init__(self) -> None:
        for name, (kind, called) in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or _is_nan(value)):
                raise InvalidOptionError(
                    name, f"{_shown(value)}, expected {called}; give one or leave it out"
                )
        for name, (fits, expected) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise InvalidOptionError(name, f"{quoted(value)} {expected}")
        if self.top_p is not None and self.temperature is None and not self.samples:
            raise InvalidOptionError(
                "top_p",
                f"{self.top_p} without a temperature, expected both, as decoding is greedy without one; "
                "add temperature=1.0 to sample from the model's own probabilities",
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
                held = "an empty text" if text == "" else _shown(text)
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
        """Whether tokens are sampled."""
        return bool(self.generate_kwargs.get("do_sample", self.temperature))


class OptionFields(TypedDict, total=False):
    """The fields of :class:`Options` as keywords of a call: ``engine.ask(question, max_new_tokens=20)``."""

    mode: Mode | None
    policy: str | None
    schedule: str | None
    ratio: Ratio | None
    max_new_tokens: int | None
    stop: str | Sequence[str]
    temperature: float | None
    top_p: float | None
    apply_chat_template: bool
    chat_template_kwargs: Mapping[str, Any]
    enable_thinking: bool | None
    reasoning_effort: str | None
    generate_kwargs: Mapping[str, Any]
    timeout_s: float | None
    min_ratio: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | bool | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    opening: str
    explain: bool
    cache_salt: str | None
    tenant: str | None
    plain_messages: bool | None


_ASKED = ("top_k", "history")  # arguments of ask that are not options

#: Shows every option in the signature of a call.
takes_options = shows(OptionFields, Options())


def with_keywords(options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """``options`` with the keywords of a call, which replace its fields.

    Raises :class:`InvalidInputError` for anything else than options and for a keyword that is none.
    """
    if not isinstance(options, Options | None):
        raise InvalidInputError(
            f"options is {_shown(options)}, expected Options(…); or pass options as keywords, such as "
            "max_new_tokens=20"
        )
    known = [one.name for one in fields(Options)]
    if unknown := sorted(set(keywords) - set(known)):
        close = [one for name in unknown for one in get_close_matches(name, [*known, *_ASKED], n=1)]
        meant = f"did you mean {', '.join(close)}? " if close else ""
        raise InvalidInputError(
            f"{', '.join(unknown)}: not an option of a request; {meant}the options are the fields of "
            f"blendrag.Options, and ask takes {' and '.join(_ASKED)}, too"
        )
    return replace(options or Options(), **keywords)


# -- request and answer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What was asked, with every default filled in. Nothing has been computed yet."""

    prompt: SegmentedPrompt
    options: Options
    mode: Mode
    policy: str
    schedule: Schedule
    ratio: float
    """With ``is_auto``, the smallest allowed."""
    max_new_tokens: int
    asked_at: float
    """``time.perf_counter()`` when the caller asked."""
    source_of: Mapping[str, str] = field(default_factory=dict)
    """Source of each chunk, by chunk id."""
    notes: tuple[str, ...] = ()
    fresh: FreshText | None = None
    """What may be learned; ``None`` if nothing."""
    is_auto: bool = False
    """Whether the loading controller chooses the ratio."""
    opening_s: float = 0.0
    """Seconds of opening the tokenizer for this request."""
    fills_context: bool = False
    """Whether ``max_new_tokens`` is what the context has room for, and more was allowed."""
    sequences: int = 1
    """Sequences that ``generate`` runs: beams or returned sequences."""
    placed: PlacedPrompt | None = None
    """The prompt with fixed positions, if it is that of a schema with ``positions="schema"``."""
    retrieval_s: float = 0.0
    """Seconds of finding its chunks, before it was asked."""
    form: Format | None = None
    """In which the model writes reasoning and tool calls; ``None`` for a prompt without the chat template."""
    answer_form: AnswerForm | None = None
    begun: str = ""
    """What of the answer the prompt already holds."""
    shared_ends: tuple[int, ...] = ()
    """Where beginnings of the rendered prompt end that later ones may share, in characters."""
    trace_context: Any = field(default_factory=tracing.current, repr=False, compare=False)
    """Of the caller's thread, for spans on the scheduler's."""

    def new_policy(self) -> SelectionPolicy:
        """The policy that selects the recomputed tokens, for one fusion."""
        if self.mode == "reuse":
            return make_policy("reuse")
        if self.mode == "prefix":  # every loaded span is exact, so there is nothing to select
            return make_policy("full")
        return make_policy(self.policy)

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
        return Explanation(self, self.trace)
