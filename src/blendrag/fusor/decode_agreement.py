"""How often packed weights choose the token that the model's own weights choose.

Each of :data:`TEXTS` is prefilled, and the model's own weights decode :data:`TOKENS` tokens greedily. Over a
copy of the same KV, the packed weights get the same tokens. A step agrees if the token that they would choose
has the highest logit of the model's own, which several may have: in bfloat16, logits near 16 lie 0.125 apart.
Both decode one row at a time, because products of several rows round in another way. The copy of the LM head
alone is compared in the same steps, on what the model's own layers give the head.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from blendrag.fusor.attention import fast_decoding
from blendrag.model.adapter import ModelAdapter
from blendrag.model.decode_weights import DecodeWeights
from blendrag.model.sharing import only_here

#: Agreement from which packed weights are used by default.
LEAST_AGREEMENT = 0.99
#: Tokens decoded after each text.
TOKENS = 32


@dataclass(frozen=True)
class DecodeAgreement:
    """What was measured over all texts."""

    tokens: int
    agreed: int
    kl: float
    """Mean KL divergence from the model's own distribution, in nats per token."""
    native_s: float
    """A token by the model's own weights, behind a short text."""
    packed_s: float
    size_bytes: int = 0
    """Memory of the packed weights."""
    opening_s: float = 0.0
    """Opening them again, from the user's cache if they are kept there."""
    layers: dict[str, int] = field(default_factory=dict)
    """Packed layers by format."""
    head_agreed: int = 0
    """The steps in which the packed LM head would choose the same token behind the model's own layers."""

    @property
    def share(self) -> float:
        return self.agreed / self.tokens

    @property
    def suffices(self) -> bool:
        return self.share >= LEAST_AGREEMENT

    @property
    def head_share(self) -> float:
        return self.head_agreed / self.tokens

    @property
    def head_suffices(self) -> bool:
        return self.head_share >= LEAST_AGREEMENT


class AgreementMeasurement:
    """Measures ``weights`` piece by piece. The caller holds the model's lock."""

    def __init__(
        self, adapter: ModelAdapter, weights: DecodeWeights, texts: Sequence[str] = ()
    ) -> None:
        self.weights = weights
        self._adapter = adapter
        self._texts = list(texts or TEXTS)[::-1]
        self._tokens = TOKENS * len(self._texts)
        self._caches: tuple[Any, Any] | None = None
        self._next = torch.empty(0)
        self._left = 0
        self._agreed: list[bool] = []
        self._head_agreed: list[bool] = []
        self._kl: list[float] = []
        self._seconds = [0.0, 0.0]

    @torch.inference_mode()
    def step(self) -> DecodeAgreement | None:
        """Measure the next token, so that requests need not wait for more; the result after the last one."""
        with self._adapter.uncompiled(), fast_decoding(self._adapter.stack):
            if not self._left:
                self._begin(self._texts.pop())
            self._decode()
            self._left -= 1
        if self._left or self._texts:
            return None
        count = len(self._agreed)
        native_s, packed_s = (seconds / count for seconds in self._seconds)
        return DecodeAgreement(
            count,
            sum(self._agreed),
            sum(self._kl) / count,
            native_s,
            packed_s,
            self.weights.size_bytes,
            layers=self.weights.layers_by_format,
            head_agreed=sum(self._head_agreed),
        )

    @property
    def share(self) -> float:
        """How much of it is done."""
        return len(self._agreed) / self._tokens

    def run(self, watch: Callable[[float], None] = lambda share: None) -> DecodeAgreement:
        """All that is left; ``watch`` is called before each token with :attr:`share`."""
        watch(self.share)
        while (found := self.step()) is None:
            watch(self.share)
        return found

    def _begin(self, text: str) -> None:
        adapter = self._adapter
        ids = adapter.tokens.tokenizer(text, return_tensors="pt")["input_ids"].to(adapter.device)
        out = adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        self._caches = out.past_key_values, copy.deepcopy(out.past_key_values)
        self._next, self._left = out.logits[0, -1].argmax(), TOKENS

    def _decode(self) -> None:
        assert self._caches is not None
        model = self._adapter.model
        own, packed = (
            {"input_ids": self._next.view(1, 1), "past_key_values": cache, "use_cache": True}
            for cache in self._caches
        )
        began = time.perf_counter()
        with self._calls_of_head() as calls:
            expected = model(**own).logits[0, -1]  # [V]
        middle = time.perf_counter()
        found = self.weights.decode(model, **packed).logits[0, -1]
        self._seconds[0] += middle - began
        self._seconds[1] += time.perf_counter() - middle
        self._next = expected.argmax()
        self._agreed.append(bool(expected[found.argmax()] == expected.max()))
        for hidden, logits in calls:
            assert self.weights.head is not None
            chosen = self.weights.head.multiply(hidden)[0, -1].argmax()
            self._head_agreed.append(bool(logits[0, -1, chosen] == logits[0, -1].max()))
        likely, by_packed = (logits.float().log_softmax(-1) for logits in (expected, found))
        self._kl.append(float((likely.exp() * (likely - by_packed)).sum()))

    @contextmanager
    def _calls_of_head(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Inputs and outputs of the LM head's own weights in this context; none if it has no copy."""
        calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        with ExitStack() as stack:
            if (head := self.weights.head) is not None:
                hook = only_here(lambda layer, inputs, output: calls.append((inputs[0], output)))
                stack.callback(head.layer.register_forward_hook(hook).remove)
            yield calls


#: Texts of several kinds, of about 60 tokens each.
TEXTS = (
    "The harbour of the old town was built in three stages. The first quay, finished in 1874, served fishing "
    "boats. Twenty years later a railway company added a second one for coal, and after the war the city "
    "paid for a third, which is used by ferries today. Visitors who arrive by ship",
    "Bread needs only flour, water, salt and yeast. Mix the flour with the water and let it rest for half an "
    "hour before you add the rest. Knead the dough until it is smooth, cover it, and wait until it has "
    "doubled its size. Then",
    "Context: The museum is open from Tuesday to Sunday, from ten to six. Tickets cost nine euros; children "
    "under twelve enter for free. Guided tours begin at eleven and at three.\n\nQuestion: When can I visit "
    "the museum, and what does it cost for a family with two small children?\n\nAnswer:",
    "def median(values):\n    \"\"\"The middle of the sorted values.\"\"\"\n"
    "    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n        return "
    "ordered[middle]\n",
    "A heat pump moves heat from a cold place to a warm one. It needs electricity for its compressor, but "
    "the heat that it delivers is three to four times the energy it takes. In winter, when the air "
    "outside is cold, the",
    "Dear Ms Porter,\n\nthank you for your order of 12 March. Unfortunately one of the two lamps is out of "
    "stock until the end of the month. We can send the other lamp today, or both together as soon as",
    "Photosynthesis takes place in the chloroplasts of plant cells. Light is absorbed by chlorophyll, water "
    "is split, and oxygen is released. In the second part of the process, carbon dioxide",
    "The committee met twice in May. Its members agreed that the bridge should be repaired before the "
    "winter, but not on how to pay for the work. The treasurer proposed a loan over ten years. The mayor, "
    "however,",
    "Q: Which planet of the solar system is the largest?\nA: Jupiter is the largest planet of the solar "
    "system.\nQ: Why is the sky blue during the day and red in the evening?\nA:",
    "She closed the door behind her and listened. The house was silent, apart from the clock in the kitchen. "
    "On the table lay a letter in a hand that she did not know. She sat down, opened it, and",
)  # fmt: skip
