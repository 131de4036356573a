"""The correctness gate: may this model's stored KV be reused? (``blendrag verify``)

r = 1.0 alone proves nothing, because no loaded KV is read. So, on the model as loaded:

a. KV of a prompt is computed at an offset and re-positioned to 0. A random non-contiguous fifth of its rows
   is recomputed from layer 1 on. The logits of those rows equal a stock prefill's, as do those of the
   policy ``hkvd`` and of the default one;
b. the same with disturbed values must differ from a stock prefill, which shows that a. can fail. Keys are not
   disturbed: under nearly even attention they hardly matter;
c. both on a prompt more than twice the largest window, up to :data:`MAX_PROMPT_TOKENS`;
d. r = 1.0 through the scatter and explicit-mask path, and greedy decoding over it, equal stock.

For models with running states, whose chunks are reused whole, (a) is a prompt with two chunks that were
encoded behind what really precedes them, at an offset. Its logits and greedy tokens equal a stock prefill's.
(b) is the same with both disturbed; in float32 either alone must show, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from blendrag.config import DEFAULT_POLICY
from blendrag.errors import UnsupportedModelError
from blendrag.fusor.composer import Composer, composed_in_order
from blendrag.fusor.fusor import Fusor
from blendrag.fusor.loader import HeldKV, LoadedSpan
from blendrag.fusor.request import BlendRequest
from blendrag.fusor.selection import Blending, LayerView, SelectionPolicy, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.model.composition import Composition
from blendrag.model.fingerprint import is_quantised
from blendrag.model.kv_compare import LOGIT_TOLERANCE, content, difference_of, shows_errors
from blendrag.model.positions import Repositioner
from blendrag.model.structure import unsupported_if_raising
from blendrag.store.kv import ChunkKV, dtype_name

Verdict = Literal["blendable", "refused"]

#: Counts up when the gate measures something else, so that earlier verdicts are not used.
GATE_VERSION = 7

OFFSET = 37
#: Where the prompt is moved to, to see how noisy the model's own logits are.
NOISE_OFFSETS = (10, 20, 30)
GREEDY_TOKENS = 32
PROMPT_TOKENS = 96
#: Tokens at the end of a prompt that are not loaded: attention of one row is laid out like no other.
QUESTION_TOKENS = 4
#: Most rows whose logits are compared: logits of every row would take gigabytes with a large vocabulary.
COMPARED_ROWS = 256
#: Longest prompt for (c); larger windows are checked as far as this goes.
MAX_PROMPT_TOKENS = 16384
#: What follows the gate's first prefill, in prefills of the same prompt.
REMAINING_PREFILLS = 6


@dataclass(frozen=True)
class Verification:
    """What the gate measured; differences are absolute, of logits."""

    verdict: Verdict
    reason: str
    layers: tuple[str, ...]
    max_logit_diff: float | None = None
    """At r = 1.0 (d)."""
    subset_logit_diff: float | None = None
    """Over loaded KV (a)."""
    perturbed_logit_diff: float | None = None
    """Over disturbed KV (b)."""
    allowed_logit_diff: float | None = None
    """The largest difference of the first two that counts as equal."""
    greedy_equal: bool | None = None
    """Whether the first :data:`GREEDY_TOKENS` greedy tokens over the blended cache equal stock (d)."""
    prompt_tokens: int = 0
    fast_attention: bool = False

    @property
    def blendable(self) -> bool:
        return self.verdict == "blendable"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def expected_s(adapter: ModelAdapter, token_s: float, step_s: float) -> float:
    """Seconds that :func:`verify` takes, from those of a prefilled token and of a forward of one token."""
    prefills = 1 + REMAINING_PREFILLS
    return prefills * _gate_prompt(adapter).shape[1] * token_s + 2 * GREEDY_TOKENS * step_s


@torch.inference_mode()
def verify(
    adapter: ModelAdapter, announce: Callable[[int, float], None] = lambda tokens, seconds: None
) -> Verification:
    """Run the gate. A model that fails it is refused, not raised. Takes the model's lock.

    ``announce(tokens, seconds)`` gets the prompt's length and how long the rest is expected to take.
    """
    if adapter.refusal is not None:
        return Verification("refused", adapter.refusal, ())
    layers = tuple(adapter.repositioner.kinds)
    try:
        name = type(adapter.model).__name__
        with adapter.lock, adapter.uncompiled(), unsupported_if_raising(name):
            if adapter.composition is not None:
                return _measure_composed(adapter, adapter.composition, announce)
            return _measure(adapter, layers, announce)
    except UnsupportedModelError as refused:
        return Verification("refused", str(refused), layers)


def _measure(
    adapter: ModelAdapter, layers: tuple[str, ...], announce: Callable[[int, float], None]
) -> Verification:
    ids = _gate_prompt(adapter)
    n = ids.shape[1]
    began = time.perf_counter()
    kv = _kv_at_offset(adapter, ids)
    announce(n, REMAINING_PREFILLS * (time.perf_counter() - began))
    loaded_tokens = n - QUESTION_TOKENS
    order = torch.randperm(loaded_tokens, generator=torch.Generator().manual_seed(2))
    rows = order[: max(1, n // 5)].sort().values.to(adapter.device)
    computed = torch.cat((rows, torch.arange(loaded_tokens, n, device=adapter.device)))
    step = -(-len(computed) // COMPARED_ROWS)
    spread = torch.arange(len(computed) - 1, -1, -step, device=adapter.device).flip(0)
    seen = computed[spread]  # evenly, the last one included
    stock = _kept(adapter.model(input_ids=ids, use_cache=True, logits_to_keep=seen).logits, seen)
    # Chameleon gives this to the tokens of images
    forbidden = stock == torch.finfo(stock.dtype).min
    scale = float(stock.float().masked_fill(forbidden, 0).abs().max()) or 1.0
    fusor = Fusor(adapter)

    def subset_diff(loaded: ChunkKV) -> float:
        request = _request(n, HeldKV(loaded), FixedRows(rows))
        logits, _, _ = fusor.prefill(ids, request, logits_to_keep=spread)
        return difference_of(_kept(logits, spread), stock)

    def policy_diff(policy: str, schedule: str) -> float:
        """What users run, over exact KV: the peek or the scout, fewer rows from layer to layer."""
        request = _request(n, HeldKV(kv), make_policy(policy), schedule, 0.2)
        logits, _, _ = fusor.prefill(ids, request)
        return difference_of(logits[0], stock[-1:])

    subset = max(
        subset_diff(kv), policy_diff("hkvd", "geometric"), policy_diff(DEFAULT_POLICY, "linear")
    )
    perturbed = subset_diff(_disturbed(kv, adapter.repositioner, 3.0))
    full, greedy = _full_recompute(adapter, ids, seen, stock, kv)
    tolerance = LOGIT_TOLERANCE[dtype_name(adapter.precision)] * max(scale, 1.0)
    rounds = adapter.precision != torch.float32 or is_quantised(adapter.model)
    if rounds and max(subset, full) > tolerance:
        tolerance = max(tolerance, 2 * _own_noise(adapter, ids, seen, stock))
    reason = _why_refused(subset, perturbed, full, greedy, scale, tolerance, adapter.precision)
    return Verification(
        verdict="refused" if reason else "blendable",
        reason=reason or "loaded KV reproduces a stock prefill, and disturbed KV does not",
        layers=layers,
        max_logit_diff=full,
        subset_logit_diff=subset,
        perturbed_logit_diff=perturbed,
        allowed_logit_diff=tolerance,
        greedy_equal=greedy,
        prompt_tokens=n,
        fast_attention=fusor.fast_attention,
    )


def _measure_composed(
    adapter: ModelAdapter, composition: Composition, announce: Callable[[int, float], None]
) -> Verification:
    ids = _gate_prompt(adapter)
    n, tokens = ids.shape[1], ids[0].tolist()
    rows = min(n - 3 * n // 4, COMPARED_ROWS)
    began = time.perf_counter()
    assert adapter.continuation is not None
    stock_cache = adapter.continuation.new_cache()  # RecurrentGemma returns none
    stock = adapter.model(
        input_ids=ids, past_key_values=stock_cache, use_cache=True, logits_to_keep=rows
    ).logits[0, -rows:]
    announce(n, REMAINING_PREFILLS * (time.perf_counter() - began))
    scale = float(stock.float().abs().max()) or 1.0
    # the first run, a chunk, three tokens between chunks, a chunk directly before the question
    starts = (n // 9, n // 2 + 3)
    ends = (n // 2, n - rows)
    records = [
        composition.encode(tokens[:start], tokens[start:end], OFFSET)
        for start, end in zip(starts, ends, strict=True)
    ]

    def spans_of(loaded: Sequence[ChunkKV]) -> list[LoadedSpan]:
        return [
            LoadedSpan(start, end, HeldKV(kv), OFFSET + start, exact=False)
            for start, end, kv in zip(starts, ends, loaded, strict=True)
        ]

    def composed(loaded: Sequence[ChunkKV]) -> tuple[float, int, Any]:
        cache, at, _ = composed_in_order(composition, ids, spans_of(loaded))
        logits = composition.forward(ids[:, at:], cache, at, rows)
        return difference_of(logits, stock), int(logits[-1].argmax()), cache

    differs, first, cache = composed(records)
    composer = Composer(adapter)
    if composer.serves:  # as requests run it
        prompt = composer.prefill(ids, spans_of(records))
        with prompt.replayed(adapter.stack.base) as cache:
            last = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
        differs, first = max(differs, difference_of(last, stock[-1])), int(last.argmax())
    greedy = _greedy(adapter, first, cache)
    expected = _greedy(adapter, int(stock[-1].argmax()), stock_cache)
    disturbed_kv = [_disturbed(kv, composition.repositioner, 3.0) for kv in records]
    disturbed_states = [composition.disturbed(kv, 3.0) for kv in records]
    both = [composition.disturbed(kv, 3.0) for kv in disturbed_kv]
    perturbed = composed(both)[0]
    alone = min(composed(disturbed_kv)[0], composed(disturbed_states)[0])
    tolerance = LOGIT_TOLERANCE[dtype_name(adapter.precision)] * max(scale, 1.0)
    if adapter.precision != torch.float32 and not differs <= tolerance:
        cache = composition.new_cache()
        composition.forward(ids[:, : ends[1]], cache, 0)
        parted = difference_of(composition.forward(ids[:, ends[1] :], cache, ends[1], rows), stock)
        seen = torch.arange(n - rows, n, device=adapter.device)
        tolerance = max(tolerance, 2 * parted, 2 * _own_noise(adapter, ids, seen, stock))
    is_greedy = greedy == expected
    reason = _why_refused(differs, perturbed, 0.0, is_greedy, scale, tolerance, adapter.precision)
    if not reason and adapter.precision == torch.float32 and not alone > 2 * tolerance:
        reason = (
            f"disturbing only KV or only running states moves logits by {alone:.3g}, so the check cannot see "
            "a wrong one; use mode full"
        )
    if not differs <= tolerance:
        reason = f"composing chunks changes logits by {differs:.3g} (allowed {tolerance:.3g}); use mode full"
    return Verification(
        verdict="refused" if reason else "blendable",
        reason=reason or "composed chunks reproduce a stock prefill, and disturbed ones do not",
        layers=composition.kinds,
        subset_logit_diff=differs,
        perturbed_logit_diff=perturbed,
        allowed_logit_diff=tolerance,
        greedy_equal=is_greedy,
        prompt_tokens=n,
    )


def _why_refused(
    subset: float,
    perturbed: float,
    full: float,
    greedy: bool,
    scale: float,
    tolerance: float,
    precision: torch.dtype,
) -> str:
    """One sentence, or an empty string if the model passes. NaN never passes."""
    allowed = f"(allowed {tolerance:.3g}); use mode full"
    if not subset <= tolerance:
        return f"recomputing a fifth of the rows over loaded KV changes logits by {subset:.3g} {allowed}"
    if not shows_errors(perturbed, subset, scale):
        return (
            f"disturbing the loaded values moves logits by only {perturbed:.3g}, so the check cannot see "
            "a wrong KV; use mode full"
        )
    if not full <= tolerance:
        return f"recomputing everything changes logits by {full:.3g} {allowed}"
    if not greedy and precision == torch.float32:
        return f"greedy decoding over the blended cache differs within {GREEDY_TOKENS} tokens; use mode full"
    return ""


def _own_noise(
    adapter: ModelAdapter, ids: torch.Tensor, seen: torch.Tensor, stock: torch.Tensor
) -> float:
    """How much stock logits change if the whole prompt is moved. Rounded activations are noisy, a few rows
    far more than the others and not at every place."""
    noise = []
    for offset in NOISE_OFFSETS:
        at = torch.arange(offset, offset + ids.shape[1], device=ids.device)[None]
        moved = adapter.model(input_ids=ids, position_ids=at, logits_to_keep=seen).logits
        noise.append(difference_of(_kept(moved, seen), stock))
    return max(noise)


def _full_recompute(
    adapter: ModelAdapter, ids: torch.Tensor, seen: torch.Tensor, stock: torch.Tensor, kv: ChunkKV
) -> tuple[float, bool]:
    """(d): r = 1.0 over scatter and explicit masks, then greedy decoding over that cache."""
    fusor = Fusor(adapter, fast_attention=False, force_masks=True)
    request = _request(ids.shape[1], HeldKV(kv), make_policy("full"))
    logits, _, _ = fusor.prefill(ids, request, logits_to_keep=seen)
    last, cache, _ = fusor.prefill(ids, request, GREEDY_TOKENS)  # as requests run it
    blended = _greedy(adapter, int(last[0, -1].argmax()), cache)
    stock_out = adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1)
    expected = _greedy(adapter, int(stock[-1].argmax()), stock_out.past_key_values)
    difference = max(difference_of(_kept(logits, seen), stock), difference_of(last[0], stock[-1:]))
    return difference, blended == expected


def _kept(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``logits`` of these rows, ``[n, V]``, also of models without ``logits_to_keep`` (Video-LLaMA 3)."""
    return logits[0] if logits.shape[1] == len(rows) else logits[0, rows]


def _greedy(adapter: ModelAdapter, first: int, cache: Any) -> list[int]:
    tokens = [first]
    while len(tokens) < GREEDY_TOKENS:
        step = torch.tensor([[tokens[-1]]], device=adapter.device)
        out = adapter.model(input_ids=step, past_key_values=cache, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


# -- what it runs on ------------------------------------------------------------------------------


class FixedRows(SelectionPolicy):
    name = "fixed"

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        return self._positions


def _request(
    tokens: int,
    reader: HeldKV,
    policy: SelectionPolicy,
    schedule: str = "constant",
    ratio: float = 1.0,
) -> BlendRequest:
    span = LoadedSpan(0, tokens - QUESTION_TOKENS, reader, OFFSET, exact=False)
    return BlendRequest(tokens, (span,), Blending.of(policy, schedule, ratio))


def _kv_at_offset(adapter: ModelAdapter, ids: torch.Tensor) -> ChunkKV:
    """KV of the whole prompt but its question, computed at ``OFFSET``."""
    layers = adapter.prefill_at(ids[0].tolist(), OFFSET).layers
    end = ids.shape[1] - QUESTION_TOKENS
    kv = [
        shape.joined(layer.keys[0, :, :end], layer.values[0, :, :end]).cpu()
        for shape, layer in zip(adapter.layout.layers, layers, strict=True)
    ]
    return ChunkKV(adapter.layout, end, kv)


def _gate_prompt(adapter: ModelAdapter) -> torch.Tensor:
    """Random ids ``[1, N]``, more than twice the largest window as far as the model and the limit allow."""
    windows = filter(None, adapter.stack.windows.values())
    n = max([PROMPT_TOKENS, *(2 * window.tokens + 8 for window in windows)])
    limit = adapter.blend_limit_tokens or adapter.context_tokens
    n = min(n, MAX_PROMPT_TOKENS, limit - OFFSET - GREEDY_TOKENS - 1)
    if n < 8:
        raise UnsupportedModelError(f"a context of {limit} tokens is too short to verify blending")
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (1, n), generator=generator).to(adapter.device)


def _disturbed(kv: ChunkKV, moves: Repositioner, size: float) -> ChunkKV:
    """``kv`` with noise added to its values (in latent layers, to the latents that hold them), in proportion
    to how much each channel differs between tokens, so that large biases do not enlarge it."""
    generator = torch.Generator().manual_seed(1)
    layers = []
    attention = 0
    for shape, layer in zip(kv.layout.layers, kv.layers, strict=True):
        if shape.is_state:
            layers.append(layer)
            continue
        both = [*shape.split(layer)]  # [Hkv, T, D] each
        at, attention = 1 - moves.part(attention), attention + 1
        noise = torch.randn(both[at].shape, generator=generator, dtype=torch.float32)
        noise *= size * content(both[at], both[at].roll(1, -2))
        both[at] = (both[at].float() + noise).to(layer.dtype)
        layers.append(shape.joined(*both))
    return ChunkKV(kv.layout, kv.tokens, layers)
