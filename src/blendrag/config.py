"""The table of options, and the settings of a process: their defaults, and ``BLENDRAG_*`` variables.

Each option is declared here once, as a type that carries its :class:`~blendrag.option.Option`: help, range,
and who may set it. A surface lists the options it takes with these types: :class:`Settings`,
:class:`EngineOptions` and :class:`RequestDefaults` below, ``engine/request.py``, ``frameworks/fields.py``,
``server/bodies.py``, ``cli/options.py``. ``tests/test_options.py`` compares every surface and
``docs/options.md`` with the table.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

from blendrag.errors import InvalidOptionError
from blendrag.option import (
    Elsewhere,
    Option,
    did_you_mean,
    is_number,
    is_whole,
    mapping,
    near_names,
    number,
    one_of,
    path,
    share,
    size,
    switch,
    text,
    whole,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

AUTO: Literal["auto"] = "auto"
#: Name of the embedded model.
DEMO_MODEL = "demo"
#: Name of the policy that ``blendrag calibrate`` found for the model, else :data:`DEFAULT_POLICY`.
CALIBRATED = "calibrated"
#: The lowest mean KL from full prefill over three pretrained models (docs/quality.md).
DEFAULT_POLICY = "query+shift"
DEFAULT_SCHEDULE = "constant"
#: r: mean share of chunk tokens recomputed in layers 1…L-1 (CacheBlend §4.3, figure 16). At 0.3 pretrained
#: models agreed with full prefill on 96% of the tokens of two question sets (docs/quality.md).
DEFAULT_RATIO = 0.3
DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
#: Largest number of alternatives per token, as in OpenAI's API.
MAX_LOGPROBS = 20
#: Most chunks that a chunk is encoded after.
MAX_ENCODE_AFTER = 4
#: How the names of all variables begin.
_VARIABLES = "BLENDRAG_"

_MODES = Literal["blend", "full", "prefix", "reuse"]
_ENCODINGS = Literal["native", "int8"]
#: How chunks are searched for.
SearchMode = Literal["hybrid", "dense", "lexical"]
_DECODE_WEIGHTS = Literal["auto", "native", "int8", "int4"]
#: What the cache directory has a folder of: what was measured of models and of this machine, packed copies of
#: weights, unpacked GGUF files.
CacheFolder = Literal["verdicts", "decode-weights", "gguf"]

# Who may set an option: every surface takes all options of its name.
_ENV = "env"
_PYTHON = "engine wrapper"
_ENGINE = "engine wrapper cli ray"
_SETTING = f"env {_ENGINE}"
_EVERYWHERE = f"request server {_SETTING}"
_REQUEST = "request wrapper server"
_SAMPLING = f"{_REQUEST} cli"
_SERVE = "cli ray"

# fmt: off
# -- which model, which store ---------------------------------------------------------------------

Model = Annotated[str, Option("model",
    "Hub id or directory of a causal LM, GGUF file, or demo; in Python also a loaded model.",
    _SETTING, "a model", bool, unless_given="the store's", flags="--model -m")]
Store = Annotated[Path, path("store", "Directory of the KV store and the corpus.", _SETTING,
    flags="--store -s")]
Tokenizer = Annotated["PreTrainedTokenizerBase", Option("tokenizer",
    "Tokenizer of a loaded model; a named one has its own.", _PYTHON, "loaded", bool)]
Dtype = Annotated[str, text("dtype", "auto, float32, float16 or bfloat16.", _SETTING)]
Device = Annotated[str, text("device", "auto, cpu, cuda or cuda:N.", _SETTING)]
DeviceMap = Annotated[str | Mapping[str, Any], Option("device_map",
    "Where accelerate places the weights, instead of device; all must be on one device.", _PYTHON,
    "a text or a dictionary", lambda v: isinstance(v, str | Mapping))]
ModelKwargs = Annotated[Mapping[str, Any], mapping("model_kwargs",
    "More arguments of AutoModelForCausalLM.from_pretrained: revision, …", _PYTHON)]
Lora = Annotated[str, path("lora", "Directory of a PEFT adapter.", _ENGINE)]
Writer = Annotated[str, path("writer",
    "Directory of a LoRA that is active while chunks are encoded (blendrag adapt); none: without.",
    _SETTING, unless_given="the store's")]
EncodeAfter = Annotated[int, whole("encode_after",
    "Most similar chunks that each chunk is encoded after; 0: none.", _SETTING, 0, MAX_ENCODE_AFTER,
    unless_given="the store's, else 0")]
TrustRemoteCode = Annotated[bool, switch("trust_remote_code",
    "Run Python files that come with the model or the embedder. Read them first.", _ENGINE,
    flags="--trust-remote-code")]
Embedder = Annotated[str, text("embedder", "sentence-transformers model, or minilm-offline.",
    _SETTING, unless_given="the store's, else MiniLM")]
ChunkTokens = Annotated[int, whole("chunk_tokens",
    "Largest chunk of a new corpus, in the model's tokens.", _SETTING, 64, 4096)]
PrefixText = Annotated[str, text("prefix_text",
    "Rendered prompt up to the first chunk; new chunks are encoded after it.", _PYTHON)]
EncodePrefix = Annotated[bool, switch("encode_prefix",
    "False encodes the chunks of a new corpus without any prefix.", _PYTHON)]
RamBytes = Annotated[int, size("ram_bytes", "Limit of the memory tier: 2GiB, 500MB, …", _SETTING)]
DiskBytes = Annotated[int, size("disk_bytes", "Limit of the disk tier: 64GiB, …", _SETTING,
    unless_given="the store's, else 64 GiB")]
Remote = Annotated[str, text("remote",
    "Object store shared by machines: s3://bucket/prefix, gs://, az:// or file:///dir.", _SETTING)]
KVEncoding = Annotated[_ENCODINGS, one_of("kv_encoding",
    f"How a new store keeps KV: {', '.join(get_args(_ENCODINGS))}.", _SETTING,
    get_args(_ENCODINGS))]
DecodeWeights = Annotated[_DECODE_WEIGHTS, one_of("decode_weights",
    f"Weights that decode answers on a CPU: {', '.join(get_args(_DECODE_WEIGHTS))}.", _SETTING,
    get_args(_DECODE_WEIGHTS))]
Learn = Annotated[bool, switch("learn",
    "Learn passages that return in prompts, and reuse them from the third time.", f"env {_PYTHON}")]
ReadOnly = Annotated[bool, switch("read_only", "Write nothing into the store.",
    f"{_PYTHON} cli", flags="--read-only")]

# -- settings of a process only -------------------------------------------------------------------

Cache = Annotated[Path, path("cache",
    "Directory of what this machine found out about models, and of interrupted runs.", _ENV,
    unless_given="~/.cache/blendrag")]
RemoteKey = Annotated[str, text("remote_key",
    "Secret of the machines that share remote; KV without its seal is unused.", _ENV)]
RemoteTimeout = Annotated[float, number("remote_timeout_s",
    "Seconds that a prompt waits for remote; then its KV is computed.", _ENV,
    "a number of seconds above 0, at most a day", lambda v: 0 < v <= 86_400)]
BatchBytes = Annotated[int, size("batch_bytes",
    "Memory for the KV of requests that run at the same time; 0 runs one after another.", _ENV)]
MaxRunning = Annotated[int, whole("max_running", "Most requests that run at the same time.", _ENV,
    1)]
PrefixMinTokens = Annotated[int, whole("prefix_min_tokens",
    "Shortest beginning of a prompt that is kept as an exact prefix.", _ENV, 1)]

# -- what a server takes --------------------------------------------------------------------------

MaxRequests = Annotated[int, whole("max_requests",
    "Requests waiting and running, of each replica; more get status 429.", _SERVE, 1,
    unless_given="256")]
MaxBodyBytes = Annotated[int, size("max_body_bytes", "Largest body of a request: 500kB, 8MiB, …",
    _SERVE, unless_given="8 MiB", flags="--max-body")]
MaxUploadBytes = Annotated[int, size("max_upload_bytes",
    "Largest file that is uploaded: 500MB, 1GiB, …", "cli", unless_given="64 MiB",
    flags="--max-upload")]
MaxTokens = Annotated[int, whole("max_tokens", "Longest answer that a request may ask for.", _SERVE,
    1, unless_given="the model's context")]

# -- how prompts are blended ----------------------------------------------------------------------

Mode = Annotated[_MODES, one_of("mode", f"{', '.join(get_args(_MODES))}: how stored KV is used.",
    _EVERYWHERE, get_args(_MODES))]
Policy = Annotated[str, text("policy",
    "Which tokens are recomputed: query+shift, query, cacheblend, boundary(k), …",
    _EVERYWHERE, unless_given=f"what blendrag calibrate found, else {DEFAULT_POLICY}")]
Schedule = Annotated[str, text("schedule",
    "constant, linear, geometric[:g], first:m or one ratio per layer.", _EVERYWHERE)]
#: In [0, 1], or ``auto``: chosen by the loading controller from a profile (``blendrag profile``).
Ratio = Annotated[float | Literal["auto"], share("ratio",
    "Share of tokens recomputed; auto: as many as cost no time (see blendrag profile).",
    _EVERYWHERE, AUTO, unless_given=f"what blendrag calibrate found, else {DEFAULT_RATIO}")]
MinRatio = Annotated[float, share("min_ratio", "Lowest ratio that ratio auto may choose.",
    _EVERYWHERE)]
TopK = Annotated[int, whole("top_k", "Chunks in a prompt.", "env engine cli server ray", 1)]
Search = Annotated[SearchMode, one_of("search",
    "hybrid, dense or lexical: chunks are found by vectors and by their words, or by one of them.",
    "env engine cli server ray", get_args(SearchMode))]
Reranker = Annotated[str, text("reranker",
    "sentence-transformers cross-encoder that sorts what search found; more exact, and slower.",
    "env engine cli ray")]

# -- what is asked and answered -------------------------------------------------------------------

MaxNewTokens = Annotated[int, whole("max_new_tokens", "Longest answer in tokens.", _EVERYWHERE, 1,
    unless_given="to its end or that of the context")]
System = Annotated[str, text("system", "System message of prompts that have none.", _EVERYWHERE)]
PromptTemplate = Annotated[str, Option("prompt_template",
    "What ask puts around the chunks and the question: a text with {context} and {question}.",
    _EVERYWHERE, "a text with {context} and, after it, {question}", lambda v: isinstance(v, str)
    and v.count("{context}") == v.count("{question}") == 1
    and v.index("{context}") < v.index("{question}"))]
ChatTemplateKwargs = Annotated[Mapping[str, Any], mapping("chat_template_kwargs",
    "Arguments of the model's chat template: reasoning_effort=low.", _EVERYWHERE)]
EnableThinking = Annotated[bool, switch("enable_thinking",
    "Whether the model thinks before it answers.", _EVERYWHERE,
    unless_given="what its chat template does", flags="--thinking/--no-thinking")]
PlainMessages = Annotated[bool, switch("plain_messages",
    "Control tokens in system and user messages are text, as in documents.", _EVERYWHERE,
    flags="--plain-messages/--no-plain-messages")]
ReasoningEffort = Annotated[str, text("reasoning_effort",
    "How much the model thinks, for templates that read it; none: not at all.", _REQUEST)]
ApplyChatTemplate = Annotated[bool, switch("apply_chat_template",
    "False sends the prompt as it is.", "request wrapper")]
# logits divided by less are infinite
Temperature = Annotated[float, number("temperature", "0 decodes greedily.", _SAMPLING,
    "0, or a number of at least 1e-30", lambda v: v == 0 or v >= 1e-30)]
TopP = Annotated[float, number("top_p",
    "Sample from the likeliest tokens of this share; needs a temperature.", _SAMPLING,
    "a number in (0, 1]", lambda v: 0 < v <= 1)]
Stop = Annotated[str | Sequence[str], Option("stop", "End the answer before this text.",
    _SAMPLING, "a text or a list of texts", lambda v: isinstance(v,
    str | list | tuple | set | frozenset))]
Seed = Annotated[int, whole("seed", "Makes sampling repeatable.", _SAMPLING, -(2**63), 2**64 - 1)]
PresencePenalty = Annotated[float, number("presence_penalty",
    "Subtracted from the logits of tokens that the answer has.", _SAMPLING, "a number in [-2, 2]",
    lambda v: -2 <= v <= 2)]
FrequencyPenalty = Annotated[float, number("frequency_penalty",
    "Subtracted once for each time that the answer has the token.", _SAMPLING, "a number in [-2, 2]",
    lambda v: -2 <= v <= 2)]
LogitBias = Annotated[Mapping[int, float], Option("logit_bias",
    "Added to the logits of these tokens.", _REQUEST,
    "a dictionary of token ids and numbers in [-100, 100]", lambda v: isinstance(v,
    Mapping) and all(map(_is_bias, v.items())))]
Logprobs = Annotated[int, whole("logprobs",
    "Log probabilities: 0 of the chosen tokens, k also of the k likeliest.", _REQUEST, 0,
    MAX_LOGPROBS)]
TimeoutS = Annotated[float, number("timeout_s",
    "Seconds for the whole answer, the wait for other requests included.", _REQUEST,
    "a number of seconds above 0; leave it out for no limit", lambda v: v > 0)]
GenerateKwargs = Annotated[Mapping[str, Any], mapping("generate_kwargs",
    "More arguments of transformers' generate: repetition_penalty=1.1, top_k=40, …",
    "request wrapper cli")]
Tools = Annotated[Sequence[Mapping[str, Any]], Option("tools",
    "Function schemas in OpenAI's format, for the chat template.", _REQUEST,
    "a list of function schemas", lambda v: isinstance(v, list | tuple))]
ToolChoice = Annotated[str | bool | Mapping[str, Any], Option("tool_choice",
    "auto, none, any (required) or a tool's name, also in OpenAI's nesting.", _REQUEST,
    "auto, none, any or a tool's name", lambda v: isinstance(v, str | bool | Mapping))]
ResponseFormat = Annotated[Mapping[str, Any], mapping("response_format",
    "The form of the answer, as OpenAI and vLLM write it.", _REQUEST)]
Opening = Annotated[str, text("opening", "Beginning of the answer, which the model continues.",
    "request")]
Explain = Annotated[bool, switch("explain",
    "Keep each token's state and the timeline, for Answer.explain.", "request server")]
CacheSalt = Annotated[str, text("cache_salt",
    "Shares exact prefixes with prompts of the same salt only; nothing is learned.",
    "request server")]
Tenant = Annotated[str, text("tenant",
    "Whose request it is: what prompts leave is used only for the same tenant.", "request")]

# fmt: on


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, bias = item
    return is_whole(token) and is_number(bias) and abs(bias) <= 100


#: The table: every option by its name.
OPTIONS: dict[str, Option] = {
    option.name: option
    for each in list(globals().values())
    if get_origin(each) is Annotated
    for option in get_args(each)[1:]
}


def check_options(values: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOptionError` for the first wrong value."""
    for name, value in values.items():
        if name in OPTIONS:
            OPTIONS[name].check(value)


# -- keywords -------------------------------------------------------------------------------------


class RequestDefaults(TypedDict, total=False):
    """Options that a request has, and an engine for requests that do not have them."""

    mode: Mode | None
    policy: Policy | None
    schedule: Schedule | None
    ratio: Ratio | None
    min_ratio: MinRatio | None
    max_new_tokens: MaxNewTokens | None
    system: System | None
    prompt_template: PromptTemplate | None
    chat_template_kwargs: ChatTemplateKwargs | None
    enable_thinking: EnableThinking | None
    plain_messages: PlainMessages | None


class EngineOptions(TypedDict, total=False):
    """Keywords of an engine besides ``model`` and ``store``: how they are opened, or made."""

    tokenizer: Tokenizer | None
    dtype: Dtype | None
    device: Device | None
    device_map: DeviceMap | None
    model_kwargs: ModelKwargs | None
    lora: Lora | None
    writer: Writer | None
    encode_after: EncodeAfter | None
    trust_remote_code: TrustRemoteCode | None
    embedder: Embedder | None
    chunk_tokens: ChunkTokens | None
    prefix_text: PrefixText | None
    encode_prefix: EncodePrefix | None
    ram_bytes: RamBytes | None
    disk_bytes: DiskBytes | None
    remote: Remote | None
    kv_encoding: KVEncoding | None
    decode_weights: DecodeWeights | None
    learn: Learn | None
    read_only: ReadOnly | None


class ConstructorOptions(EngineOptions, RequestDefaults, total=False):
    """Keywords of :class:`~blendrag.engine.BlendEngine`."""

    top_k: TopK | None
    search: Search | None
    reranker: Reranker | None


#: What requests are given by mistake.
OF_ENGINES = Elsewhere(
    {"model", "store", *EngineOptions.__annotations__}, "the engine", "give it to BlendEngine(…)"
)


# -- settings -------------------------------------------------------------------------------------


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "blendrag"


def variable_of(name: str) -> str:
    """The name of the variable that sets an option."""
    return f"{_VARIABLES}{name.upper()}"


def of_variable(name: str, value: object) -> str:
    """`` (BLENDRAG_NAME)``, for an error about the ``value`` of an option that is looked at only when it is
    used, if that variable has the value; otherwise nothing."""
    written = os.environ.get(variable_of(name))
    if not written:
        return ""
    with suppress(InvalidOptionError):
        held = OPTIONS[name].read(written)
        is_key = isinstance(held, Mapping) and value in held
        if is_key or str(value) in (str(held), os.path.abspath(os.path.expanduser(written))):
            return f" ({variable_of(name)})"
    return ""


def _warn_of_unknown_variables(names: Mapping[str, str]) -> None:
    """Warn of variables that look like settings; ``names`` has the name of each setting by its variable."""
    set_ones = [each for each, text in os.environ.items() if each.startswith(_VARIABLES) and text]
    if unknown := sorted(set(set_ones).difference(names)):
        # without what all have in common, which makes any two look alike
        near = near_names([each[len(_VARIABLES) :].lower() for each in unknown], names.values())
        meant = did_you_mean(map(variable_of, near), "docs/options.md lists the variables")
        log.warning("%s ignored: no setting of that name; %s", ", ".join(unknown), meant)


@dataclass(frozen=True)
class Settings:
    """Defaults of the whole package; no default is set anywhere else.

    Every field can be set from the environment: ``BLENDRAG_CHUNK_TOKENS=256``.
    """

    model: Model | None = None
    store: Store = Path("blendrag-store")
    cache: Cache = field(default_factory=_cache_directory)
    dtype: Dtype = "auto"
    """``auto``: the checkpoint's, or float32 on a CPU without fast products in it."""
    device: Device = "auto"
    writer: Writer | None = None
    """``None``: that of the store."""
    encode_after: EncodeAfter | None = None
    """``None``: that of the store."""
    embedder: Embedder | None = None
    """``None``: that of the corpus, or :data:`DEFAULT_EMBEDDER` for a new one."""
    chunk_tokens: ChunkTokens = 512
    top_k: TopK = 6
    search: Search = "hybrid"
    reranker: Reranker | None = None
    mode: Mode = "blend"
    policy: Policy = CALIBRATED
    ratio: Ratio | None = None
    """``None``: what was calibrated for the model, or :data:`DEFAULT_RATIO`."""
    min_ratio: MinRatio = DEFAULT_RATIO
    schedule: Schedule = DEFAULT_SCHEDULE
    max_new_tokens: MaxNewTokens | None = None
    system: System | None = None
    prompt_template: PromptTemplate | None = None
    chat_template_kwargs: ChatTemplateKwargs = field(default_factory=dict)
    enable_thinking: EnableThinking | None = None
    plain_messages: PlainMessages = False
    batch_bytes: BatchBytes = 2 * 1024**3
    """Also bounds prompts of a batch that are prefilled together, with their activations. An answer's KV
    grows with it; if memory runs short, the newest requests wait, and a single one may take more."""
    max_running: MaxRunning = 32
    ram_bytes: RamBytes = 2 * 1024**3
    disk_bytes: DiskBytes | None = None
    remote: Remote | None = None
    remote_key: RemoteKey | None = field(default=None, repr=False)
    remote_timeout_s: RemoteTimeout = 5.0
    kv_encoding: KVEncoding = "native"
    decode_weights: DecodeWeights = "auto"
    """``auto``: packed copies, on a CPU, if they were measured to choose the same tokens on this model."""
    learn: Learn = True
    prefix_min_tokens: PrefixMinTokens = 8

    def __post_init__(self) -> None:
        check_options(vars(self))

    @classmethod
    def from_environment(cls) -> Settings:
        """The defaults, and the ``BLENDRAG_*`` variables that are not empty. Warns of unknown ones.

        Raises :class:`InvalidOptionError`, which names the variable.
        """
        given = {}
        names = {variable_of(each.name): each.name for each in fields(cls)}
        _warn_of_unknown_variables(names)
        for variable, name in names.items():
            if written := os.environ.get(variable):
                try:
                    given[name] = OPTIONS[name].read(written)
                except InvalidOptionError as exc:
                    raise exc.called(variable) from exc
        return cls(**given)

    @property
    def fixed_ratio(self) -> float:
        """``ratio``, or ``min_ratio`` if it is ``auto``, or :data:`DEFAULT_RATIO` if there is none."""
        if self.ratio is None:
            return DEFAULT_RATIO
        return self.min_ratio if self.ratio == AUTO else self.ratio


def absolute_model(model: str | Path) -> str:
    """The absolute path of a local directory or GGUF file, as a model's name is part of its identity; other
    names unchanged.

    ``demo`` is the embedded model even if there is a directory of that name; ``./demo`` is the directory.
    """
    if model == DEMO_MODEL:
        return DEMO_MODEL
    place = Path(os.path.expanduser(model))
    is_local = place.is_dir() or (place.suffix == ".gguf" and place.is_file())
    return str(place.resolve()) if is_local else str(model)


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read from the environment once."""
    return Settings.from_environment()


def cache_folder(name: CacheFolder) -> Path:
    """A folder of the cache directory of this process, which may not be there."""
    return settings().cache.expanduser() / name
