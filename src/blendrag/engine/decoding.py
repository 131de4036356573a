"""How the next token is chosen: sampling arguments, seeded sampling, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor

from blendrag.engine.request import Options, TokenLogprob
from blendrag.model.sharing import only_here

#: Tokens decoded before a token to find its text, because some tokenizers drop a leading space.
CONTEXT_TOKENS = 4


def sampling(options: Options) -> dict[str, Any]:
    """Sampling arguments of ``generate``. Greedy decoding unsets the checkpoint's, which cause warnings."""
    if not options.samples:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    # transformers (5.23) takes no whole number for a temperature, together with other arguments
    temperature = float(options.temperature) if options.temperature else None
    given = {"temperature": temperature, "top_p": options.top_p}
    return {"do_sample": True, **{name: v for name, v in given.items() if v is not None}}


class Penalties(LogitsProcessor):
    """OpenAI's penalties for tokens that the answer already has, and biases of tokens."""

    def __init__(self, options: Options, prompt_tokens: int) -> None:
        self._presence = options.presence_penalty or 0.0
        self._frequency = options.frequency_penalty or 0.0
        biases = dict(options.logit_bias or {})
        self._biased = torch.tensor(list(biases), dtype=torch.long)  # [B]
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32)  # [B]
        self._prompt_tokens = prompt_tokens

    @classmethod
    def wanted(cls, options: Options) -> bool:
        return bool(options.presence_penalty or options.frequency_penalty or options.logit_bias)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [n, S], ``scores`` [n, V]."""
        scores = scores.clone()
        said = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, said, torch.ones_like(said, dtype=scores.dtype)
        )
        scores -= self._frequency * counts + self._presence * (counts > 0)
        known = (self._biased >= 0) & (self._biased < scores.shape[-1])
        scores[:, self._biased[known]] += self._biases[known].to(scores)
        return scores


class SeededDraws(TorchFunctionMode):
    """Within this context, this thread samples from a seeded generator.

    torch's global generators are neither read nor changed, so requests and other samplers do not affect each
    other; ``fork_rng`` would only protect the others. Every operation within costs a Python call: see
    :meth:`between_forwards`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.multinomial, torch.Tensor.multinomial):
            kwargs = {"generator": self._generator, **kwargs}
        return func(*args, **kwargs)

    @contextmanager
    def between_forwards(self, model: nn.Module) -> Iterator[None]:
        """Active outside the forwards of ``model``, which have many operations and never sample."""
        with ExitStack() as around:
            active = around.enter_context(ExitStack())

            def enter_forward(*_: Any) -> None:
                active.close()

            def leave_forward(*_: Any) -> None:
                active.close()
                active.enter_context(self)

            before = model.register_forward_pre_hook(only_here(enter_forward))
            around.callback(before.remove)
            hook = only_here(leave_forward)
            after = model.register_forward_hook(hook, always_call=True)
            around.callback(after.remove)
            active.enter_context(self)
            yield


class Likelihoods:
    """Log probabilities of one answer's tokens, before temperature, ``top_p`` and penalties."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._logits: torch.Tensor | None = None
        self._found: list[tuple[float, list[tuple[int, float]]]] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the logits of every forward of ``model``."""

        def look(module: Any, args: Any, out: Any) -> None:
            self._logits = out.logits[0, -1].detach()  # [V]

        hook = model.register_forward_hook(only_here(look))
        try:
            yield
        finally:
            hook.remove()

    def note(self, token: int) -> None:
        """``token`` was chosen after the last forward."""
        assert self._logits is not None
        likely = torch.log_softmax(self._logits.float(), -1)  # [V]
        values, ids = likely.topk(self._top)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        self._found.append((float(likely[token]), top))

    def of(
        self, chars: int, tokens: Sequence[tuple[int, str]], decode: Callable[[list[int]], str]
    ) -> tuple[TokenLogprob, ...]:
        """One entry for each of ``tokens`` (id, text) that contributes to the first ``chars``."""
        entries: list[TokenLogprob] = []
        length = 0
        for i, ((token, piece), (logprob, top)) in enumerate(zip(tokens, self._found, strict=True)):
            if length >= chars:
                break
            length += len(piece)
            before = [earlier for earlier, _ in tokens[max(0, i - CONTEXT_TOKENS) : i]]
            alone = decode(before) if top else ""
            named = tuple((decode([*before, other])[len(alone) :], p) for other, p in top)
            entries.append(TokenLogprob(piece, token, logprob, named))
        return tuple(entries)
