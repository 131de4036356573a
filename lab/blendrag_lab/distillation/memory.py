"""What training takes of the machine's memory, and how many chunks and prompts fit into it at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.machine import available_bytes
from blendrag.store.durable import readable_size
from blendrag_lab.distillation.forwards import TEACHER_BATCH, Forwards
from blendrag_lab.distillation.material import Material
from blendrag_lab.distillation.trainer import Recipe
from blendrag_lab.distillation.writer import TrainedWriter

#: Tokens of the two chunks whose activations are counted.
COUNTED_TOKENS = 64, 128
#: Float32 copies of logits that are alive at once: teacher, student, their log-softmax, gradients.
LOGITS_COPIES = 6
#: Share of the available memory that training may take, and share that logits of answers may take while they
#: wait for their turn.
SHARE, WAITING_SHARE = 0.8, 0.2


@dataclass(frozen=True)
class Needs:
    """Bytes that training takes besides the model."""

    writer_bytes: int
    """Weights, gradients and moments of AdamW, the best weights and a copy that is being saved."""
    rows_bytes: int
    """Logits, KV and attention weights of prompts, and logits of answers that wait for their turn."""
    chunk_bytes: int
    """Activations of one chunk of full length."""
    chunks: int
    available_bytes: int
    encode_batch: int
    """Chunks whose activations are held at a time; 0: those of all."""
    teacher_batch: int
    """Prompts whose answers are decoded in one batch."""
    student_batch: int
    """Prompts whose students run in one forward."""

    @property
    def total_bytes(self) -> int:
        held = self.encode_batch or self.student_batch * self.chunks
        return self.writer_bytes + self.rows_bytes + held * self.chunk_bytes

    def __str__(self) -> str:
        how = ""
        if self.encode_batch:
            how = (
                f"; activations of {self.encode_batch} of {self.chunks} chunks are held at a time, which "
                "takes about a quarter longer"
            )
        return (
            f"training takes about {readable_size(self.total_bytes)} of memory besides the model; "
            f"{readable_size(self.available_bytes)} are available{how}"
        )


def needs_of(
    adapter: ModelAdapter,
    writer: TrainedWriter,
    forwards: Forwards,
    material: Material,
    recipe: Recipe,
    available: int | None = None,
    together: int | None = None,
) -> Needs:
    """Measured on two short chunks. ``together``: the most prompts in one forward; by default those of a step
    on a GPU, where launching kernels takes longer than running them, and 1 on a CPU.

    Raises :class:`InvalidInputError` if not even one chunk fits.
    """
    if available is None:
        available = _available(adapter.device)
    if together is None:
        together = recipe.batch if adapter.device.type == "cuda" else 1
    parameters = sum(p.numel() for p in writer.parameters.values())
    chunk = material.chunk_tokens
    vocabulary = adapter.model.get_input_embeddings().num_embeddings
    rows = material.questions * (recipe.answer_tokens + 64)
    logits_bytes = 4 * rows * vocabulary
    per_token, per_pair, per_behind = _activations(forwards)
    behind = chunk * (material.similar.most if material.similar is not None else 0)
    pairs = chunk * (chunk + forwards.prefix_tokens + behind)
    chunk_bytes = int(per_token * chunk + per_behind * behind + per_pair * pairs)
    if behind:  # and once alone
        chunk_bytes += int(per_token * chunk + per_pair * chunk * (chunk + forwards.prefix_tokens))
    prompt_bytes = LOGITS_COPIES * logits_bytes
    prompt_bytes += 4 * adapter.layout.size_bytes(chunk * material.top_k)
    prompt_bytes += int(per_token * rows + per_pair * rows * chunk * material.top_k)
    writer_bytes = 6 * 4 * parameters
    teachers = min(together, int(WAITING_SHARE * available // logits_bytes))
    teachers = max(TEACHER_BATCH, teachers)
    waiting_bytes = (
        teachers * logits_bytes + 2 * recipe.held_out * recipe.answer_tokens * vocabulary
    )
    left = SHARE * available - writer_bytes - waiting_bytes
    fit = int((left - prompt_bytes) // chunk_bytes)
    if fit < 1:
        least = writer_bytes + waiting_bytes + prompt_bytes + chunk_bytes
        raise InvalidInputError(
            f"training takes at least {readable_size(least)} of memory besides the model, and "
            f"{readable_size(available)} are available; take a smaller model, shorter chunks "
            "(--chunk-tokens) or a lower --rank"
        )
    fit_together = int(left // (prompt_bytes + material.top_k * chunk_bytes))
    students = max(1, min(together, fit_together))
    encode_batch = 0 if fit >= material.top_k else fit
    rows_bytes = students * prompt_bytes + waiting_bytes
    sizes = writer_bytes, rows_bytes, chunk_bytes, material.top_k
    return Needs(*sizes, available, encode_batch, teachers, students)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def _activations(forwards: Forwards) -> tuple[float, float, float]:
    """Bytes that a chunk's forward keeps for its backward: for each token, for each pair of a token and one
    that it sees, which is far from nothing where attention keeps its weights (eager), and for each token of
    chunks that it is encoded after."""
    few, many = COUNTED_TOKENS
    alone = _kept_bytes(forwards, few)
    short, long = alone / few, _kept_bytes(forwards, many) / many
    per_pair = max(0.0, (long - short) / (many - few))
    per_behind = max(0.0, (_kept_bytes(forwards, few, many) - alone) / many - per_pair * few)
    return short - per_pair * (few + forwards.prefix_tokens), per_pair, per_behind


def _kept_bytes(forwards: Forwards, tokens: int, context_tokens: int = 0) -> int:
    own = {p.untyped_storage().data_ptr() for p in forwards.adapter.model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        held = forwards.encoded_probe(tokens, context_tokens)
    del held
    return sum(kept.values())
