"""Trains the demo model: `python -m lab.training.train --out DIR --seed 0 --minutes 90 [--resume]`.

Step i draws its samples from (seed, i) alone, so a run of `--steps` is deterministic and a resumed one
continues the same stream; with `--minutes` the clock decides where it ends. Only answers are supervised.
A batch packs many questions after each context, each blind to the others, into one forward pass. Uses a
GPU if there is one, then under bf16 autocast.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from blendrag_lab.synthetic.samples import Sample, SampleWriter
from lab.training.curriculum import DEEP, DEEP_FROM, SHALLOW, STAGES
from lab.training.tokenizer import train_tokenizer

FINAL_RATE = 3e-5
WARMUP_STEPS = 100
COOLDOWN = 0.15  # the last part of the run, over which the rate falls linearly
CURRENT_SHARE = 0.8  # of the steps; the others repeat earlier stages
SAVE_EVERY_S = 60.0
EXIT_WEIGHT = 0.5  # of the loss of answers read off after the first `SHALLOW` of the layers
ATTENTION = "blendrag_demo_packed"  # registered below, chosen by `attn_implementation`


def demo_config(tokenizer: PreTrainedTokenizerBase, layers: int = DEEP) -> LlamaConfig:
    """Width 160. The large rotary base keeps positions beyond the trained ones close to known ones."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def deepened(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model of `layers` layers, a multiple of those of `model`, that computes the same: copies that
    add nothing yet follow the last layer (stacked as by Gong et al. 2019, silent as in LLaMA Pro, §3.2)."""
    settings = {k: v for k, v in model.config.to_dict().items() if k != "layer_types"}
    deep = LlamaForCausalLM(LlamaConfig(**settings | {"num_hidden_layers": layers}))
    shallow = model.config.num_hidden_layers
    weights = {k: v for k, v in model.state_dict().items() if ".layers." not in k}
    for name, weight in model.model.layers.state_dict().items():
        index, rest = name.split(".", 1)
        for copy in range(layers // shallow):
            silent = copy and rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            key = f"model.layers.{int(index) + copy * shallow}.{rest}"
            weights[key] = torch.zeros_like(weight) if silent else weight.clone()
    deep.load_state_dict(weights)
    return deep.to(model.device)


@dataclass(frozen=True)
class Batch:
    """Samples side by side: Tc context tokens, then Tq tokens of questions."""

    kinds: tuple[str, ...]  # of the questions
    contexts: tuple[range, ...]  # flat indices of the tokens of each
    questions: tuple[range, ...]
    tokens: Tensor  # [B, Tc + Tq]
    positions: Tensor  # [B, Tc + Tq]
    mask: Tensor  # [B, 1, Tq, Tc + Tq], additive
    rows: Tensor  # [N] flat indices of the tokens that predict a supervised one
    targets: Tensor  # [N]
    first: Tensor  # [n_questions] where in `targets` each question's answer begins


def collate(samples: Sequence[Sample], pad: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Contexts are padded on the right, which the mask hides from the question rows. The positions of every
    question begin where its context ends."""
    n_context = max(len(s.tokens) for s in samples)
    n_asked = max(sum(len(q.tokens) for q in s.questions) for s in samples)
    width = n_context + n_asked
    tokens = torch.full((len(samples), width), pad)
    positions = torch.zeros((len(samples), width), dtype=torch.long)
    visible = torch.zeros((len(samples), n_asked, width), dtype=torch.bool)
    rows: list[int] = []
    targets: list[int] = []
    first: list[int] = []
    contexts = tuple(range(b * width, b * width + len(s.tokens)) for b, s in enumerate(samples))
    questions: list[range] = []
    for b, sample in enumerate(samples):
        n_own = len(sample.tokens)
        tokens[b, :n_own] = torch.tensor(sample.tokens)
        positions[b, :n_own] = torch.tensor(sample.positions)
        at = 0
        for asked in sample.questions:
            n, start = len(asked.tokens), n_context + at
            tokens[b, start : start + n] = torch.tensor(asked.tokens)
            positions[b, start : start + n] = torch.arange(n) + sample.question_position
            visible[b, at : at + n, :n_own] = True
            visible[b, at : at + n, start : start + n] = torch.ones(n, n, dtype=torch.bool).tril()
            questions.append(range(b * width + start, b * width + start + n))
            rows += questions[-1][asked.answer_at - 1 : -1]
            first.append(len(targets))
            targets += asked.tokens[asked.answer_at :]
            at += n
        visible[b, at:, 0] = True  # padding rows must see something, or their softmax is NaN
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    made = (tokens, positions, mask[:, None], *map(torch.tensor, (rows, targets, first)))
    kinds = tuple(asked.kind for sample in samples for asked in sample.questions)
    return Batch(kinds, contexts, tuple(questions), *(tensor.to(device) for tensor in made))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **more: Any,
) -> tuple[Tensor, None]:
    """query, key, value [B, H, Tc + Tq, D] → [B, Tc + Tq, H, D].

    Context rows attend causally without a mask, which saves most of the quadratic cost;
    `attention_mask` covers the last Tq rows only.
    """
    n, scale = query.shape[2] - attention_mask.shape[2], more["scaling"]
    context = scaled_dot_product_attention(
        query[:, :, :n], key[:, :, :n], value[:, :, :n], is_causal=True, scale=scale
    )
    mask = attention_mask.to(query.dtype)
    asked = scaled_dot_product_attention(query[:, :, n:], key, value, mask, scale=scale)
    return torch.cat((context, asked), dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, packed_attention)


@dataclass
class TrainingProgress:
    """State of a run; saved with the weights."""

    seed: int = 0
    step: int = 0
    stage: int = 0
    accuracy: float = 0.0  # of first answer tokens in the current stage, over about 20 steps
    elapsed_s: float = 0.0
    last_loss: float = 0.0
    layers: int = SHALLOW
    warm_from: int = 0  # the step from which the optimiser warms up
    early: float = 0.0  # accuracy of first answer tokens read off after the first `SHALLOW` layers
    by_kind: dict[str, float] = field(default_factory=dict)  # accuracy of the current stage


class TrainingRun:
    """A training run and its files in `out`: `checkpoint.pt` to resume from, model and tokenizer."""

    tokens_share = 1.0  # of a stage's tokens per step

    def __init__(self, out: Path, seed: int, resume: bool) -> None:
        self.out = out
        self.is_stopped = False
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.checkpoint = out / "checkpoint.pt"
        out.mkdir(parents=True, exist_ok=True)
        saved = None
        if resume and self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
        else:
            self.tokenizer = self.new_tokenizer(seed)
            self.tokenizer.save_pretrained(out)
        torch.manual_seed(seed)
        self.writer = SampleWriter(self.tokenizer)
        self.progress = TrainingProgress(**saved["progress"]) if saved else self.new_progress(seed)
        self.adopt(self.new_model().to(self.device))
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def new_tokenizer(self, seed: int) -> PreTrainedTokenizerFast:
        return train_tokenizer(seed)

    def new_progress(self, seed: int) -> TrainingProgress:
        return TrainingProgress(seed=seed)

    def new_model(self) -> PreTrainedModel:
        return LlamaForCausalLM(demo_config(self.tokenizer, self.progress.layers))

    def adopt(self, model: PreTrainedModel) -> None:
        """Train `model` from now on, with a fresh optimiser."""
        self.model = model
        self.model.set_attn_implementation(ATTENTION)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=FINAL_RATE, betas=(0.9, 0.98), fused=True)
        self.progress.layers = model.config.num_hidden_layers

    def train(self, minutes: float, steps: int | None) -> None:
        """Run until `steps`, else for `minutes` (of all sessions together), or until stopped; save as
        it goes."""
        progress, saved_at, last = self.progress, time.monotonic(), time.monotonic()
        while not self.is_stopped:
            done = progress.step / steps if steps else progress.elapsed_s / (60 * minutes)
            if done >= 1:
                break
            rng = random.Random(f"{progress.seed}/{progress.step}")
            stage = _drawn_stage(rng, progress.stage)
            batch = self.make_batch(rng, stage)
            loss, right = self.train_step(batch, _rate(progress, done))
            now = time.monotonic()
            progress.elapsed_s += now - last
            last = now
            progress.step += 1
            if stage == progress.stage:
                self._record(loss, batch.kinds, right)
            self.move_on(done)
            if progress.step % 10 == 0:
                _report(progress, done, batch.tokens.numel())
            if now - saved_at > SAVE_EVERY_S:
                self.save()
                saved_at = now
        self.save()

    def stop(self, *_: object) -> None:
        """Stop after the current step, so that no half step is saved."""
        self.is_stopped = True

    def save(self) -> None:
        """Write the checkpoint atomically, then the usable bf16 model."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)
        export = type(self.model)(self.model.config)
        export.load_state_dict(self.model.state_dict())
        export.to(torch.bfloat16).save_pretrained(self.out)

    def make_batch(self, rng: random.Random, stage: int) -> Batch:
        most = round(self.tokens_share * STAGES[stage].tokens_per_step)
        samples = list(_fill(rng, stage, self.writer, most))
        return collate(samples, self.tokenizer.pad_token_id, torch.bfloat16, self.device)

    def train_step(self, batch: Batch, rate: float) -> tuple[float, list[bool]]:
        """One optimiser step → (loss, of each answer whether its first token is right)."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # At this width a CPU is faster in float32 than under bf16 autocast.
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss, logits = self.forward(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        right = (logits.argmax(-1) == batch.targets)[batch.first]
        return float(loss.detach()), right.tolist()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """→ (loss, logits [N, V] of the rows that predict an answer)."""
        exits = self.progress.layers > SHALLOW
        out = self.model.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            use_cache=False,
            output_hidden_states=exits,
        )
        logits = self.read(out.last_hidden_state, batch)
        loss = cross_entropy(logits.float(), batch.targets)
        if exits:
            loss = loss + EXIT_WEIGHT * self._early_loss(out.hidden_states[SHALLOW], batch)
        return loss, logits

    def read(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`hidden` [B, T, D] → logits [N, V] of the rows that predict an answer."""
        return self.model.lm_head(hidden.flatten(0, 1)[batch.rows])

    def _early_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The loss of answers read off `hidden` [B, T, D], before the later layers (early exit loss of
        LayerSkip, §4.1): makes the first half of the layers resolve references."""
        logits = self.read(self.model.model.norm(hidden), batch)
        right = (logits.argmax(-1) == batch.targets)[batch.first].float().mean()
        self.progress.early += 0.05 * (float(right.detach()) - self.progress.early)
        return cross_entropy(logits.float(), batch.targets)

    def _record(self, loss: float, kinds: Sequence[str], right: Sequence[bool]) -> None:
        """Accuracy of the current stage by kind of question, as moving averages."""
        progress = self.progress
        for kind in dict.fromkeys(kinds):
            of_kind = [is_right for k, is_right in zip(kinds, right, strict=True) if k == kind]
            before = progress.by_kind.get(kind, 0.0)
            progress.by_kind[kind] = before + 0.05 * (sum(of_kind) / len(of_kind) - before)
        progress.accuracy = sum(progress.by_kind.values()) / len(progress.by_kind)
        progress.last_loss = loss

    def move_on(self, done: float) -> None:
        """To the next stage if this one is over; the model grows at `DEEP_FROM`."""
        progress = self.progress
        current, rest = STAGES[progress.stage], STAGES[progress.stage + 1 :]
        if rest and (progress.accuracy >= current.move_on_at or done >= current.until):
            progress.stage += 1
            progress.accuracy = 0.0
            progress.by_kind = {}
            if rest[0].name == DEEP_FROM:
                self.adopt(deepened(self.model, DEEP))
                progress.warm_from = progress.step


def _drawn_stage(rng: random.Random, current: int) -> int:
    """Mostly the current stage; else an earlier one, later ones more often."""
    back = 0
    while rng.random() > CURRENT_SHARE and back < current:
        back += rng.randint(1, 2)
    return max(0, current - back)


def _fill(
    rng: random.Random, stage: int, writer: SampleWriter, most_tokens: int
) -> Iterator[Sample]:
    """Samples of one stage, as many as fit in `most_tokens` when padded to the longest."""
    longest_context = longest_asked = n = 0
    while True:
        sample = STAGES[stage].make(rng, writer)
        if not sample.questions:
            continue
        longest_context = max(longest_context, len(sample.tokens))
        longest_asked = max(longest_asked, sum(len(q.tokens) for q in sample.questions))
        n += 1
        if n > 1 and n * (longest_context + longest_asked) > most_tokens:
            return
        yield sample


def _rate(progress: TrainingProgress, done: float) -> float:
    """The stage's learning rate, less in the warm-up and in the cool-down."""
    warm = min(1.0, (progress.step - progress.warm_from + 1) / WARMUP_STEPS)
    cool = min(1.0, (1 - done) / COOLDOWN)
    highest = STAGES[progress.stage].learning_rate
    return FINAL_RATE + (highest - FINAL_RATE) * min(warm, cool)


def _report(progress: TrainingProgress, done: float, n_tokens: int) -> None:
    kinds = ", ".join(f"{k or 'all'} {v:.3f}" for k, v in sorted(progress.by_kind.items()))
    print(
        f"step {progress.step} {done:5.1%} {progress.elapsed_s / 60:.1f} min, "
        f"stage {STAGES[progress.stage].name}: accuracy {kinds}, early {progress.early:.3f}, "
        f"loss {progress.last_loss:.3f}, {n_tokens} tokens",
        file=sys.stderr,
        flush=True,
    )


def main(run_of: type[TrainingRun] = TrainingRun, about: str = "Train the demo model.") -> None:
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory for model, tokenizer and checkpoint")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=90.0, help="training time of all sessions together")
    add("--steps", type=int, help="end after this many steps: the same weights every time")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    if not args.minutes > 0 or (args.steps is not None and args.steps < 1):
        parser.error("--minutes and --steps must be above 0")
    torch.set_num_threads(args.threads)
    run = run_of(args.out, args.seed, args.resume)
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, run.stop)
    run.train(args.minutes, args.steps)
    if run.is_stopped:
        sys.exit(130)


if __name__ == "__main__":
    main()
