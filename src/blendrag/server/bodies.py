"""Bodies of requests, in OpenAI's schema (https://platform.openai.com/docs/api-reference).

Types are strict and unknown fields are refused, so that no misspelled option is silently ignored. Fields
that do not change an answer are accepted and ignored, and so are those of :data:`UNSUPPORTED` as long as they
ask for nothing.

A body has few errors, however long it is: pydantic (2.14) takes minutes to list those of a million elements,
and meanwhile the server would answer nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    model_validator,
)

from blendrag import config
from blendrag.chat.messages import result_of
from blendrag.option import number, share, whole
from blendrag.wording import printable_line

T = TypeVar("T")
#: Most elements of a list: messages, parts of one, documents, tools, texts.
MAX_ITEMS = 10_000
#: Most answers to one request.
MAX_N = 16
#: Most entries of a document's metadata.
MAX_METADATA = 1000


#: Fields of OpenAI and of other servers that are not supported here, and the values with which they change
#: nothing. ``null`` and what is empty changes nothing either.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (), "function_call": ("auto", "none"), "functions": (), "modalities": (["text"],),
    "moderation": (), "web_search_options": (),
    # vLLM
    "add_special_tokens": (False, True), "allowed_token_ids": (),
    "bad_words": (), "best_of": (1,), "chat_template": (), "chat_template_content_format": ("auto", "string"),
    "early_stopping": (False,), "echo": (False,),
    "guided_whitespace_pattern": (), "include_stop_str_in_output": (False,), "kv_transfer_params": (),
    "length_penalty": (1,), "logits_processors": (), "media_io_kwargs": (), "mm_processor_kwargs": (),
    "prompt_embeds": (), "prompt_logprobs": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "stop_token_ids": (), "truncate_prompt_tokens": (),
    "use_beam_search": (False,), "vllm_xargs": (),
    # llama.cpp, Ollama
    "dry_multiplier": (0,), "dynatemp_range": (0,), "format": (), "grammar": (), "json_schema": (),
    "lora": (), "min_keep": (0,), "mirostat": (0,), "mirostat_mode": (0,), "n_keep": (0,), "n_probs": (0,),
    "options": (), "samplers": (), "tfs_z": (1,), "top_a": (0,), "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    # OpenRouter
    "models": (), "plugins": (), "provider": (), "route": (), "transforms": (),
}  # fmt: skip


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an unknown field may be left out without a word."""
    if value is None:
        return True
    return name in UNSUPPORTED and (value in ("", [], {}) or value in UNSUPPORTED[name])


class _FirstError(FailFast):
    __hash__ = object.__hash__  # to be part of a union


#: A list of which only the first wrong element is reported.
Items = Annotated[list[T], Field(max_length=MAX_ITEMS), _FirstError()]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: Any) -> Any:
        """Without the unknown fields that ask for something, but the first."""
        if not isinstance(given, Mapping):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {name: given[name] for name in known if name in given}
        foreign = (name for name in given if name not in known)
        unknown = islice((n for n in foreign if not _asks_for_nothing(n, given[n])), 1)
        # printable: pydantic has no words for a name with a lone surrogate
        return kept | {printable_line(str(name)): given[name] for name in unknown}


#: A limit of the answer; -1 is none.
Longest = Annotated[
    config.MaxNewTokens | None, BeforeValidator(lambda given: None if given == -1 else given)
]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class BlendOptions(Body):
    """How this request is blended, how long it may take, and whether the answer shows what became of each
    token; the defaults are those of the server. ``only`` and ``where`` are filters as on the command line."""

    mode: config.Mode | None = None
    policy: config.Policy | None = None
    schedule: config.Schedule | None = None
    ratio: config.Ratio | None = None
    min_ratio: config.MinRatio | None = None
    top_k: config.TopK | None = None
    search: config.Search | None = None
    only: str | Items[str] | None = None
    where: str | Items[str] | None = None
    timeout_s: config.TimeoutS | None = None
    plain_messages: config.PlainMessages | None = None
    system: config.System | None = None
    prompt_template: config.PromptTemplate | None = None
    explain: config.Explain | None = None
    trim_history: bool | None = None
    """If the context is full, the oldest turns are left out: so many messages as ``left_out`` says."""


class Generating(Body):
    """What requests for chats and for completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Longest = None
    temperature: config.Temperature | None = None
    top_p: config.TopP | None = None
    n: Annotated[int, whole("n", "", "", 1, MAX_N)] | None = None
    stop: str | Items[str] | None = None
    seed: config.Seed | None = None
    cache_salt: config.CacheSalt | None = None
    """As at vLLM: shares what earlier prompts left with prompts of the same salt only."""
    frequency_penalty: config.FrequencyPenalty | None = None
    presence_penalty: config.PresencePenalty | None = None
    logit_bias: dict[str, Any] | None = None
    top_k: Annotated[int, whole("top_k", "", "", -1, sys.maxsize)] | None = None
    min_p: Annotated[float, share("min_p", "", "")] | None = None
    repetition_penalty: (
        Annotated[
            float, number("", "", "", "a number above 0, at most 100", lambda v: 0 < v <= 100)
        ]
        | None
    ) = None
    typical_p: (
        Annotated[float, number("", "", "", "a number in (0, 1]", lambda v: 0 < v <= 1)] | None
    ) = None
    no_repeat_ngram_size: Annotated[int, whole("", "", "", 0, sys.maxsize)] | None = None
    min_tokens: Annotated[int, whole("", "", "", 0, sys.maxsize)] | None = None
    ignore_eos: bool | None = None
    response_format: config.ResponseFormat | None = None
    """The form of the answer: OpenAI's, or vLLM's ``regex``, ``choice`` and ``grammar``."""
    structured_outputs: dict[str, Any] | None = None
    """As at vLLM: ``json``, ``json_object``, ``regex``, ``choice`` or ``grammar``."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    blendrag: BlendOptions | None = None
    # ignored
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    priority: Any = None
    request_id: Any = None
    keep_alive: Any = None
    cache_prompt: Any = None
    usage: Any = None
    guided_decoding_backend: Any = None

    _tenant: str | None = PrivateAttr(None)

    def sent_by(self, tenant: str | None) -> Self:
        """This body, of a client that the server knows."""
        self._tenant = tenant
        return self

    @property
    def tenant(self) -> str | None:
        """Whose request it is, by its API key; no field of the body."""
        return self._tenant

    @property
    def longest(self) -> int | None:
        """Tokens of the longest answer; ``None`` if the body has no limit."""
        return self.max_tokens

    @property
    def timeout_s(self) -> float | None:
        return self.blendrag.timeout_s if self.blendrag is not None else None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Tolerant(BaseModel):
    """Parts of messages, which clients send back with fields of earlier answers."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ContentPart(BaseModel):
    """A part of a content; :mod:`blendrag.chat.messages` reads it."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str | None = None
    text: str | None = None


class CalledFunction(Tolerant):
    name: str
    arguments: Any = None


class MadeCall(Tolerant):
    id: str | int | None = None
    function: CalledFunction


class ChatTurn(Tolerant):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: Items[MadeCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    thinking: Any = None

    @model_validator(mode="before")
    @classmethod
    def _with_result_as_text(cls, given: Any) -> Any:
        """Results of tools may be any JSON."""
        if not isinstance(given, Mapping) or given.get("role") not in ("tool", "function"):
            return given
        return {**given, "content": result_of(given.get("content"))}


class OfferedFunction(Tolerant):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(Tolerant):
    type: Literal["function"] = "function"
    function: OfferedFunction


class Thinking(Tolerant):
    """As at DeepSeek and GLM."""

    type: Literal["enabled", "disabled"]


class ChatBody(Generating):
    """``POST /v1/chat/completions``."""

    messages: Items[ChatTurn]
    max_completion_tokens: Longest = None
    logprobs: bool | None = None
    top_logprobs: config.Logprobs | None = None
    tools: Items[OfferedTool] | None = None
    tool_choice: config.ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: config.ChatTemplateKwargs | None = None
    """As at vLLM."""
    enable_thinking: config.EnableThinking | None = None
    reasoning_effort: config.ReasoningEffort | None = None
    thinking: Thinking | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which is the assistant's, as at vLLM."""
    include_reasoning: bool | None = None
    """Whether the reasoning is part of the answer, as at vLLM."""
    documents: Items[str | dict[str, Any]] | None = None
    """Texts to answer from, as vLLM's and Cohere's clients send them."""
    retrieve: bool | None = None
    """Whether to search the store for texts to answer from."""
    filters: dict[str, Any] | None = None
    """Which documents ``retrieve`` searches, as in OpenAI's file search."""
    schema_name: str | None = Field(None, alias="schema")
    """The prompt schema whose modules the only message imports."""
    # ignored
    store: Any = None
    verbosity: Any = None

    @property
    def longest(self) -> int | None:
        return super().longest if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

    @property
    def thinks(self) -> bool | None:
        """Whether the model thinks, in this server's spelling or in that of DeepSeek and GLM."""
        if self.enable_thinking is not None or self.thinking is None:
            return self.enable_thinking
        return self.thinking.type == "enabled"

    @property
    def characters(self) -> int:
        """Characters of its messages and documents."""
        contents = [turn.content or "" for turn in self.messages]
        parts = [each for each in contents if isinstance(each, list)]
        texts = [each for each in contents if isinstance(each, str)]
        texts += [
            part if isinstance(part, str) else part.text or "" for each in parts for part in each
        ]
        return sum(map(len, texts)) + sum(map(_characters, self.documents or ()))


def _characters(document: Any) -> int:
    if isinstance(document, str):
        return len(document)
    return sum(map(_characters, document.values())) if isinstance(document, dict) else 0


class CompletionBody(Generating):
    """``POST /v1/completions``: the prompt as it is, without the chat template."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: config.Logprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingBody(Body):
    """``POST /v1/embeddings``."""

    input: str | Items[str] | Items[int] | Items[Items[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Any = None


def _bounded(metadata: Any) -> Any:
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} entries")
    return metadata


class GivenDocument(Body):
    """A document with the same ``source`` is replaced."""

    source: str
    text: str
    title: str | None = None
    metadata: Annotated[dict[str, str | int | float | bool], BeforeValidator(_bounded)] = {}


class IngestBody(Body):
    """``POST /v1/ingest``."""

    documents: Items[GivenDocument]
