"""Constructor arguments that all wrappers have in common: which engine, and which request options.

Limits such as "ratio in [0, 1]" are checked by :class:`Options`; here they become pydantic errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
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

from blendrag.config import Mode, Ratio
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.frameworks.engines import (
    EngineName,
    check_given,
    close_engine_of,
    engine_name,
    engine_of,
    model_text,
)

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


def check_keywords(kind: type, given: Iterable[str]) -> None:
    """Raise :class:`InvalidInputError` for keywords that ``kind``, not a pydantic model, does not take."""
    valid = inspect.signature(kind).parameters
    for name in given:
        if name not in valid:
            raise _unknown(kind, name, valid)


def _unknown(kind: type, name: str, valid: Collection[str]) -> InvalidInputError:
    close = get_close_matches(name, valid, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return InvalidInputError(
        f"{name}: not a field of {kind.__name__}; {meant}expected {', '.join(sorted(valid))}"
    )


class EngineFields(BaseModel):
    """Which engine a wrapper uses: a given one, or the shared one of a model and a store.

    A wrapper holds the names and not the shared engine, so that frameworks can create it again from
    its fields, with some of them changed.
    """

    model_config = CONFIG

    model: str | Path | PreTrainedModel | None = None
    """Hub id, directory or GGUF file of a causal LM, ``demo``, or a loaded ``AutoModelForCausalLM``; ``None``
    takes the model of the store."""
    store: Path | str | None = None
    """Directory that ``blendrag ingest --store`` filled."""
    tokenizer: PreTrainedTokenizerBase | None = Field(default=None, repr=False)
    """The tokenizer of a loaded ``model``; a model given by name has its own."""
    dtype: str | None = None
    device: str | None = None
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    device_map: str | dict[str, Any] | None = None
    """Where accelerate places the weights, instead of ``device``; all must be on one device."""
    model_kwargs: dict[str, Any] | None = None
    """More arguments of ``AutoModelForCausalLM.from_pretrained``."""
    embedder: str | None = None
    """sentence-transformers model for a new corpus; an existing corpus remembers its own."""
    trust_remote_code: bool | None = None
    """Run Python files that come with ``model`` or ``embedder``. Read them first."""
    learn: bool | None = None
    """``False`` learns no passages from prompts."""
    given_engine: BlendEngine | None = Field(default=None, alias="engine", exclude=True, repr=False)
    """``engine=``: a ``BlendEngine`` to use instead of the names above."""
    _name: EngineName | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Say in one sentence which field was meant."""
        try:
            return handler(given)
        except ValidationError as exc:
            valid = [field.alias or name for name, field in cls.model_fields.items()]
            for error in exc.errors():
                if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
                    raise _unknown(cls, str(error["loc"][0]), valid) from exc
            raise

    @model_validator(mode="after")
    def _take_engine(self) -> EngineFields:
        names: Any = {name: getattr(self, name) for name in EngineName._fields}
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


class RequestFields(EngineFields):
    """Request options of a wrapper; ``None`` takes the engine's default."""

    mode: Mode | None = None
    """``blend``, ``full``, ``prefix`` or ``reuse``."""
    policy: str | None = None
    """Selection policy of mode ``blend``: ``query``, ``hkvd``, ``boundary(k)``, …"""
    schedule: str | None = None
    ratio: Ratio | None = None
    """Mean share of chunk tokens recomputed, in [0, 1], or ``auto``: the loading controller chooses."""
    min_ratio: float | None = None
    """Lower limit of ``ratio="auto"``, in [0, 1]."""
    max_new_tokens: int | None = None
    """Longest answer in tokens. ``max_tokens``, the frameworks' name for it, is accepted too."""
    temperature: float | None = None
    """0 or ``None`` decodes greedily."""
    top_p: float | None = None
    stop: list[str] | None = None
    """Texts that end an answer; the ``stop`` of a call replaces them."""
    apply_chat_template: bool = True
    """``False`` sends strings unchanged, and messages as the framework flattens them."""
    plain_messages: bool | None = None
    """``True``: what looks like a control token in system and user messages is text. Turn it on where
    chains put documents into them."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the chat template."""
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers; ``None`` leaves it to the chat template."""
    reasoning_effort: str | None = None
    """How much the model thinks, for templates that read it; ``none`` turns thinking off."""
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments of transformers' ``generate`` (``num_beams``, ``repetition_penalty``, …)."""
    timeout_s: float | None = None
    """Seconds until the whole answer, including the wait for other requests; ``None`` waits forever.
    ``timeout``, the frameworks' name for it, is accepted too."""
    seed: int | None = None
    """Random seed of sampling."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    """Return the log probability of each token."""
    top_logprobs: int | None = None
    """With ``logprobs``: also return those of so many most likely tokens per position."""

    @model_validator(mode="before")
    @classmethod
    def _rename_standard(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not _STANDARD.keys() & given.keys():
            return given
        renamed = {_STANDARD[n]: given[n] for n in _STANDARD if given.get(n) is not None}
        return {n: value for n, value in given.items() if n not in _STANDARD} | renamed

    @property
    def max_tokens(self) -> int | None:
        """``max_new_tokens``, as LangChain and LlamaIndex call it."""
        return self.max_new_tokens

    @model_validator(mode="after")
    def _check_request(self) -> RequestFields:
        from blendrag.fusor.selection import Schedule, make_policy

        self.request_options()
        if self.policy is not None:
            make_policy(self.policy)
        if self.schedule is not None:
            Schedule.parse(self.schedule)
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


#: The fields above that are options, without ``stop``, which the frameworks pass by itself.
_FIELDS = [n for n in RequestFields.model_fields if n not in (*EngineFields.model_fields, "stop")]
#: LangChain's and LlamaIndex's own names of options, and ours.
_STANDARD = {"max_tokens": "max_new_tokens", "timeout": "timeout_s"}
#: Options that only a call has.
_OF_CALLS = (*_STANDARD, "tools", "tool_choice", "response_format")
#: Names of call options, as the frameworks or blendrag spell them, and the names of the options.
CALL_OPTIONS = {name: _STANDARD.get(name, name) for name in (*_FIELDS, *_OF_CALLS)}


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in options if name not in CALL_OPTIONS]
    if unknown:
        raise InvalidInputError(
            f"{', '.join(sorted(unknown))}: not an option of a call; expected stop, "
            f"{', '.join(_FIELDS)}; others go into generate_kwargs"
        )
    return {CALL_OPTIONS[name]: value for name, value in options.items() if value is not None}


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
