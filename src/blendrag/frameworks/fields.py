"""Constructor arguments that all wrappers have in common: which engine, and which request options.

Limits such as "ratio in [0, 1]" are checked by :class:`Options`; here they become pydantic errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_serializer,
    model_validator,
)

from blendrag import config
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.frameworks.engines import (
    EngineName,
    check_given,
    close_engine_of,
    engine_name,
    engine_of,
    model_text,
)
from blendrag.option import Elsewhere, refuse_unknown
from blendrag.wording import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from blendrag.engine import BlendEngine, Options
else:  # importing a wrapper does not import transformers
    PreTrainedModel = PreTrainedTokenizerBase = BlendEngine = Any

#: A misspelt argument is an error. The frameworks' base classes ignore it, and in pydantic the last base
#: wins, so wrappers repeat ``model_config = CONFIG``.
CONFIG = ConfigDict(
    extra="forbid", populate_by_name=True, arbitrary_types_allowed=True, protected_namespaces=()
)


_OF_ENGINES = Elsewhere(
    {"reranker"}, "the engine", "give engine=BlendEngine(…, reranker=…), or set BLENDRAG_RERANKER"
)


def check_keywords(kind: type, given: Iterable[str]) -> None:
    """Raise :class:`InvalidInputError` for keywords that ``kind``, not a pydantic model, does not take."""
    names = inspect.signature(kind).parameters
    refuse_unknown(given, names, f"a field of {kind.__name__}", elsewhere=_OF_ENGINES)


class NamedEngineFields(BaseModel):
    """Which engine, by names that can be written down."""

    model_config = CONFIG

    store: config.Store | str | None = None
    dtype: config.Dtype | None = None
    device: config.Device | None = None
    lora: config.Lora | None = None
    writer: config.Writer | None = None
    encode_after: config.EncodeAfter | None = None
    trust_remote_code: config.TrustRemoteCode | None = None
    embedder: config.Embedder | None = None
    chunk_tokens: config.ChunkTokens | None = None
    ram_bytes: config.RamBytes | None = None
    disk_bytes: config.DiskBytes | None = None
    remote: config.Remote | None = None
    kv_encoding: config.KVEncoding | None = None
    decode_weights: config.DecodeWeights | None = None


class DefaultFields(BaseModel):
    """Options of requests that an engine has defaults for."""

    mode: config.Mode | None = None
    policy: config.Policy | None = None
    schedule: config.Schedule | None = None
    ratio: config.Ratio | None = None
    min_ratio: config.MinRatio | None = None
    max_new_tokens: config.MaxNewTokens | None = None
    system: config.System | None = None
    prompt_template: config.PromptTemplate | None = None
    chat_template_kwargs: config.ChatTemplateKwargs | None = None
    enable_thinking: config.EnableThinking | None = None
    plain_messages: config.PlainMessages | None = None


class EngineFields(NamedEngineFields):
    """Which engine a wrapper uses: a given one, or the shared one of a model and a store.

    A wrapper holds the names and not the shared engine, so that frameworks can create it again from
    its fields, with some of them changed.
    """

    model_config = CONFIG

    model: str | Path | PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = Field(default=None, repr=False)
    device_map: config.DeviceMap | None = None
    model_kwargs: config.ModelKwargs | None = None
    prefix_text: config.PrefixText | None = None
    encode_prefix: config.EncodePrefix | None = None
    learn: config.Learn | None = None
    read_only: config.ReadOnly | None = None
    given_engine: BlendEngine | None = Field(default=None, alias="engine", exclude=True, repr=False)
    """``engine=``: a ``BlendEngine`` to use instead of the names above."""
    _name: EngineName | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Say in one sentence which field was meant."""
        if isinstance(given, dict):
            aliases = {name: field.alias for name, field in cls.model_fields.items() if field.alias}
            given = _one_name_each(given, aliases)
        try:
            return handler(given)
        except ValidationError as exc:
            valid = [field.alias or name for name, field in cls.model_fields.items()]
            extra = [each["loc"] for each in exc.errors() if each["type"] == "extra_forbidden"]
            unknown = [str(place[0]) for place in extra if len(place) == 1]
            refuse_unknown(unknown, valid, f"a field of {cls.__name__}", elsewhere=_OF_ENGINES)
            raise

    @model_validator(mode="after")
    def _take_engine(self) -> EngineFields:
        # what a wrapper declares itself is its own, such as the limit of a splitter
        kinds = [
            k for k in type(self).__mro__ if issubclass(k, EngineFields) and k is not EngineFields
        ]
        own = {name for kind in kinds for name in inspect.get_annotations(kind)}
        names: Any = {n: None if n in own else getattr(self, n) for n in _ENGINE_FIELDS}
        if self.given_engine is None:
            self._check_model()
            self._name = engine_name(**names)
            engine_of(self._name)  # raises now for bad names
        else:
            check_given(self.given_engine, **names)
        return self

    def _check_model(self) -> None:
        loaded = not isinstance(self.model, str | Path | None)
        if loaded != (self.tokenizer is not None) or isinstance(self.tokenizer, str):
            raise InvalidInputError(
                f"model is {model_text(self.model)!r} and tokenizer is {model_text(self.tokenizer)!r}, "
                "expected a name alone, or a loaded model with its loaded tokenizer, which cannot be "
                "serialised; give both or a name"
            )

    @property
    def engine(self) -> BlendEngine:
        """The given engine, or the shared one of these names. Creating it loads no model yet."""
        if self._name is not None:
            return engine_of(self._name)
        assert self.given_engine is not None
        return self.given_engine

    @field_serializer("model", "store", "tokenizer")
    def _as_text(self, value: Any) -> str | None:
        return model_text(value)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, model_text(value) if name == "model" else value

    def close(self) -> None:
        """Close the shared engine of these names for all its wrappers; the next call opens it again.

        A given engine stays open; its creator closes it.
        """
        if self._name is not None:
            close_engine_of(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A wrapper of the same engine: the model is not copied."""
        kept = {} if memo is None else memo
        kept |= {id(one): one for one in (self.given_engine, self.model, self.tokenizer)}
        return super().__deepcopy__(kept)

    def __getstate__(self) -> dict[Any, Any]:
        given = "engine=" if self.given_engine is not None else "a loaded model"
        if self.given_engine is not None or self.tokenizer is not None:
            raise InvalidInputError(
                f"a wrapper made with {given} cannot be pickled, as its engine holds a model and open "
                "files; make it from the model's name and store= instead"
            )
        return super().__getstate__()


class RequestFields(EngineFields, DefaultFields):
    """Request options of a wrapper; ``None`` takes the engine's default.

    ``max_tokens`` and ``timeout``, the frameworks' names of ``max_new_tokens`` and ``timeout_s``, are
    accepted, too. The ``stop`` of a call replaces the field; ``logprobs`` and ``top_logprobs`` are a switch
    and a number, as at OpenAI.
    """

    temperature: config.Temperature | None = None
    top_p: config.TopP | None = None
    stop: list[str] | None = None
    apply_chat_template: config.ApplyChatTemplate = True
    reasoning_effort: config.ReasoningEffort | None = None
    generate_kwargs: config.GenerateKwargs | None = None
    timeout_s: config.TimeoutS | None = None
    seed: config.Seed | None = None
    presence_penalty: config.PresencePenalty | None = None
    frequency_penalty: config.FrequencyPenalty | None = None
    logit_bias: config.LogitBias | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_standard(cls, given: Any) -> Any:
        return _one_name_each(given, _STANDARD) if isinstance(given, dict) else given

    @property
    def max_tokens(self) -> int | None:
        """``max_new_tokens``, as LangChain and LlamaIndex call it."""
        return self.max_new_tokens

    @model_validator(mode="after")
    def _check_request(self) -> RequestFields:
        self.request_options()
        return self

    def request_options(self, stop: Sequence[str] | None = None, **overrides: Any) -> Options:
        """Options of one call: these fields, overridden by the arguments of the call.

        Raises :class:`InvalidInputError` for an option that does not exist or is out of range.
        """
        from blendrag.engine import Options

        given = _known({name: getattr(self, name) for name in _FIELDS}) | _known(overrides)
        top = given.pop("top_logprobs", None)
        given["logprobs"] = _logprobs_of(given.get("logprobs"), top)
        given["stop"] = self.stop if stop is None else stop
        try:
            return Options(**given)
        except InvalidOptionError as exc:
            raise exc.called(_spelling(exc.name, overrides, top)) from None


_ENGINE_FIELDS = [n for n in EngineFields.model_fields if n != "given_engine"]
#: The fields that are options of a request, without ``stop``, which the frameworks pass by itself.
_FIELDS = [n for n in RequestFields.model_fields if n not in (*EngineFields.model_fields, "stop")]
#: LangChain's and LlamaIndex's own names of options, and ours.
_STANDARD = {"max_tokens": "max_new_tokens", "timeout": "timeout_s"}
#: Options that only a call has.
_OF_CALLS = (*_STANDARD, "tools", "tool_choice", "response_format")
#: Names of call options, as the frameworks or blendrag spell them, and the names of the options.
CALL_OPTIONS = {name: _STANDARD.get(name, name) for name in (*_FIELDS, *_OF_CALLS)}


def _one_name_each(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """``given`` with each option that has two ``names`` under its second one.

    Raises :class:`InvalidInputError` for an option that has different values under both.
    """
    kept = dict(given)
    for other, name in names.items():
        value = kept.pop(other, None)
        if value is None:
            continue
        if kept.get(name) not in (None, value):
            raise InvalidInputError(
                f"{other} {quoted(value, 40)} and {name} {quoted(kept[name], 40)} are one option, expected "
                f"one value; leave {other} out"
            )
        kept[name] = value
    return kept


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    otherwise = "arguments of transformers' generate go into generate_kwargs"
    of_engines = Elsewhere(_ENGINE_FIELDS, "the engine", "give it to the constructor")
    known = *CALL_OPTIONS, "stop"
    refuse_unknown(options, known, "an option of a call", otherwise, of_engines)
    named = _one_name_each(options, _STANDARD)
    return {name: value for name, value in named.items() if value is not None}


def _spelling(option: str, call: Mapping[str, Any], top_logprobs: int | None) -> str:
    """How the caller spells an option: as in this call, otherwise as the field."""
    if option == "logprobs" and top_logprobs is not None:
        return "top_logprobs"
    names = [name for name, known in CALL_OPTIONS.items() if known == option]
    used = [name for name in names if call.get(name) is not None]
    return (*used, *names, option)[0]


def _logprobs_of(logprobs: bool | int | None, top: int | None) -> int | None:
    """OpenAI's switch and number as one number: ``None`` is off, 0 is the chosen tokens only."""
    if logprobs is None or logprobs is False:
        if top:
            raise InvalidInputError(
                f"top_logprobs {top} without logprobs, expected both; add logprobs=True"
            )
        return None
    return top or 0 if logprobs is True else logprobs
