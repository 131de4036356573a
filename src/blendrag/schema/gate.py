"""May tokens of this model be placed? Measured before the first module of a schema is encoded.

On the model as loaded: a prompt placed at 0… gives the logits of a stock prefill; with gaps between its
parts, the logits do not change when the parts are in another order in the cache; with disturbed values they
do, which shows that the others can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import DynamicCache

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.gate import Verification
from blendrag.model.kv_compare import LOGIT_TOLERANCE, difference_of, shows_errors
from blendrag.model.placement import PlacedModel
from blendrag.store.kv import dtype_name

PART_TOKENS = 16
FRESH_TOKENS = 4
#: Between parts; within the smallest sliding windows.
GAP = 7


@torch.inference_mode()
def verify_placement(
    model: PlacedModel, announce: Callable[[int, float], None] = lambda tokens, seconds: None
) -> Verification:
    """Run the gate. A model that fails it is refused, not raised. Takes the model's lock."""
    if model.refusal is not None:
        return Verification("refused", model.refusal, ())
    try:
        with model.lock, model.uncompiled():
            return _measure(model)
    except UnsupportedModelError as refused:
        return Verification("refused", str(refused), ())


def _measure(model: PlacedModel) -> Verification:
    n = 2 * PART_TOKENS + FRESH_TOKENS
    gap = min(GAP, (model.limit - n) // 2)
    if gap < 1:
        raise UnsupportedModelError(
            f"{model.limit} positions are too few for the modules of a schema"
        )
    vocab = model.model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    stock = model.model(input_ids=torch.tensor([ids], device=model.device)).logits[0]
    scale = max(float(stock.float().abs().max()), 1.0)

    def placed(
        positions: Sequence[int], order: Sequence[int], disturbance: float = 0.0
    ) -> torch.Tensor:
        """Logits ``[s, V]`` of the fresh tokens over the other parts in that order."""
        before, cache = n - FRESH_TOKENS, DynamicCache()
        together = model.prefill_at(ids[:before], positions[:before])
        at = torch.tensor(order, device=model.device)
        for i, layer in enumerate(together.layers):
            values = layer.values + disturbance * layer.values.roll(1, -2)
            cache.update(layer.keys[:, :, at], values[:, :, at], i)
        fresh = torch.tensor([ids[before:]], device=model.device)
        with model.placed(cache, [*(positions[i] for i in order), *positions[before:]]):
            return model.model(input_ids=fresh, past_key_values=cache, use_cache=True).logits[0]

    in_order = list(range(2 * PART_TOKENS))
    swapped = in_order[PART_TOKENS:] + in_order[:PART_TOKENS]
    gaps = [i + gap * (i // PART_TOKENS) for i in range(n)]
    contiguous = difference_of(placed(range(n), in_order), stock[-FRESH_TOKENS:])
    expected = placed(gaps, in_order)
    difference = max(contiguous, difference_of(placed(gaps, swapped), expected))
    disturbed = difference_of(placed(gaps, swapped, 3.0), expected)
    tolerance = LOGIT_TOLERANCE[dtype_name(model.precision)] * scale
    reason = ""
    if not difference <= tolerance:
        reason = (
            f"placing its tokens changes logits by {difference:.3g} (allowed {tolerance:.3g}), so modules of "
            "a schema cannot be placed; use mode full"
        )
    elif not shows_errors(disturbed, difference, scale):
        reason = (
            f"disturbing the values of modules moves logits by only {disturbed:.3g}, so the check cannot see "
            "a wrong KV; use mode full"
        )
    return Verification(
        verdict="refused" if reason else "blendable",
        reason=reason or "placed modules give a stock prefill's logits, and disturbed ones do not",
        layers=(),
        subset_logit_diff=difference,
        perturbed_logit_diff=disturbed,
        allowed_logit_diff=tolerance,
        prompt_tokens=n,
    )
