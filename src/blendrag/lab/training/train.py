"""Trains the demo model: `python -m blendrag.lab.training.train --out DIR --seed 0 --minutes 90
[--resume]`.

Owns: the optimiser, the clock, the checkpoint. Step i draws its samples from
(seed, i) alone, so a run of `--steps` is deterministic and a resumed one continues the same stream;
with `--minutes` the clock decides where it ends. Supervises answers only; uses a GPU if there is one,
then under bf16 autocast.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from blendrag.lab.training.batching import ATTENTION, Batch, collate
from blendrag.lab.training.curriculum import DEEP, DEEP_FROM, SHALLOW, STAGES
from blendrag.lab.training.geometry import deepened, demo_config
from blendrag.lab.training.samples import Sample, Writer
from blendrag.lab.training.tokenizer import train_tokenizer

FINAL_RATE = 3e-5
WARMUP_STEPS = 100
COOLDOWN = 0.15  # the last part of the run, over which the rate falls linearly
CURRENT_SHARE = 0.8  # of the steps; the rest keeps the earlier stages alive
SAVE_EVERY_S = 60.0
EXIT_WEIGHT = 0.5  # of the loss of answers read off after the first `SHALLOW` of the layers


@dataclass
class Progress:
    """Where a run is; saved with the weights."""

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


class Run:
    """One training run and its files in `out`: `checkpoint.pt` to resume from, model and
    tokenizer to use.
    """

    def __init__(self, out: Path, seed: int, resume: bool) -> None:
        self.out = out
        self.is_stopped = False
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.checkpoint = out / "checkpoint.pt"
        out.mkdir(parents=True, exist_ok=True)
        saved = (
            torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            if resume and self.checkpoint.exists()
            else None
        )
        if saved:
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
        else:
            self.tokenizer = train_tokenizer(seed)
            self.tokenizer.save_pretrained(out)
        torch.manual_seed(seed)
        self.writer = Writer(self.tokenizer)
        self.progress = Progress(**saved["progress"]) if saved else Progress(seed=seed)
        config = demo_config(self.tokenizer, self.progress.layers)
        self.adopt(LlamaForCausalLM(config).to(self.device))
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def adopt(self, model: LlamaForCausalLM) -> None:
        """Trains `model` from now on, with a fresh optimiser."""
        self.model = model
        self.model.set_attn_implementation(ATTENTION)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        kept = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=FINAL_RATE, betas=(0.9, 0.98), fused=True)
        self.progress.layers = model.config.num_hidden_layers

    def train(self, minutes: float, steps: int | None) -> None:
        """Runs until `steps`, or else until `minutes` (of all sessions together) are over, or until it
        is stopped; saves as it goes.
        """
        progress, saved_at, last = self.progress, time.monotonic(), time.monotonic()
        while (done := progress.step / steps if steps else progress.elapsed_s / (60 * minutes)) < 1:
            if self.is_stopped:
                break
            rng = random.Random(f"{progress.seed}/{progress.step}")
            stage = _drawn_stage(rng, progress.stage)
            batch = self._batch(rng, stage)
            loss, right = self._step(batch, _rate(progress, done))
            now = time.monotonic()
            progress.elapsed_s += now - last
            last = now
            progress.step += 1
            self._move_on(stage, loss, dict(_by_kind(batch.kinds, right)), done)
            if progress.step % 10 == 0:
                _report(progress, done, batch.tokens.numel())
            if now - saved_at > SAVE_EVERY_S:
                self.save()
                saved_at = now
        self.save()

    def stop(self, *_: object) -> None:
        """After the step at hand: half of one, or one that is not counted, would be saved otherwise."""
        self.is_stopped = True

    def save(self) -> None:
        """Writes the checkpoint, then the usable bf16 model beside it; each replaces its
        predecessor atomically.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, self.checkpoint.with_suffix(".new"))
        self.checkpoint.with_suffix(".new").replace(self.checkpoint)
        export = LlamaForCausalLM(self.model.config)
        export.load_state_dict(self.model.state_dict())
        export.to(torch.bfloat16).save_pretrained(self.out)

    def _batch(self, rng: random.Random, stage: int) -> Batch:
        samples = list(_fill(rng, stage, self.writer))
        return collate(samples, self.tokenizer.pad_token_id, torch.bfloat16, self.device)

    def _step(self, batch: Batch, rate: float) -> tuple[float, list[bool]]:
        """One optimiser step → (loss, of each answer whether its first token is right)."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # At this width a CPU is faster in float32 than under bf16 autocast.
        on_gpu = self.device.type == "cuda"
        exits = self.progress.layers > SHALLOW
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on_gpu):
            out = self.model.model(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                attention_mask=batch.mask,
                use_cache=False,
                output_hidden_states=exits,
            )
            logits = self._read(out.last_hidden_state, batch)
        loss = cross_entropy(logits.float(), batch.targets)
        if exits:
            loss = loss + EXIT_WEIGHT * self._early_loss(out.hidden_states[SHALLOW], batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        right = (logits.argmax(-1) == batch.targets)[batch.first]
        return float(loss.detach()), right.tolist()

    def _read(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`hidden` [B, T, D] → logits [N, V] of the rows that predict an answer."""
        return self.model.lm_head(hidden.flatten(0, 1)[batch.rows])

    def _early_loss(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Of answers read off `hidden` [B, T, D], which the later layers have not seen yet (early exit
        loss of LayerSkip, §4.1): references are resolved in the first half then, and not as late as the
        last layers allow.
        """
        logits = self._read(self.model.model.norm(hidden), batch)
        right = (logits.argmax(-1) == batch.targets)[batch.first].float().mean()
        self.progress.early += 0.05 * (float(right.detach()) - self.progress.early)
        return cross_entropy(logits.float(), batch.targets)

    def _move_on(self, stage: int, loss: float, accuracy: dict[str, float], done: float) -> None:
        progress = self.progress
        if stage == progress.stage:
            for kind, value in accuracy.items():
                before = progress.by_kind.get(kind, 0.0)
                progress.by_kind[kind] = before + 0.05 * (value - before)
            progress.accuracy = sum(progress.by_kind.values()) / len(progress.by_kind)
            progress.last_loss = loss
        over = (
            progress.accuracy >= STAGES[progress.stage].move_on_at
            or done >= STAGES[progress.stage].until
        )
        if over and progress.stage + 1 < len(STAGES):
            progress.stage += 1
            progress.accuracy = 0.0
            progress.by_kind = {}
            if STAGES[progress.stage].name == DEEP_FROM:
                self.adopt(deepened(self.model, DEEP))
                progress.warm_from = progress.step


def _by_kind(kinds: Sequence[str], right: Sequence[bool]) -> Iterator[tuple[str, float]]:
    """The share of right answers of each kind."""
    for kind in set(kinds):
        of_kind = [r for k, r in zip(kinds, right, strict=True) if k == kind]
        yield kind, sum(of_kind) / len(of_kind)


def _drawn_stage(rng: random.Random, current: int) -> int:
    """The current stage mostly; else an earlier one, the later the likelier, to keep it alive."""
    back = 0
    while rng.random() > CURRENT_SHARE and back < current:
        back += rng.randint(1, 2)
    return max(0, current - back)


def _fill(rng: random.Random, stage: int, writer: Writer) -> Iterator[Sample]:
    """Samples of one stage, as many as fit in a step's tokens when padded to the longest."""
    longest_context = longest_asked = n = 0
    while True:
        sample = STAGES[stage].make(rng, writer)
        if not sample.questions:
            continue
        longest_context = max(longest_context, len(sample.tokens))
        longest_asked = max(longest_asked, sum(len(q.tokens) for q in sample.questions))
        n += 1
        if n > 1 and n * (longest_context + longest_asked) > STAGES[stage].tokens_per_step:
            return
        yield sample


def _rate(progress: Progress, done: float) -> float:
    """The stage's learning rate, less in the warm-up and in the cool-down."""
    warm = min(1.0, (progress.step - progress.warm_from + 1) / WARMUP_STEPS)
    cool = min(1.0, (1 - done) / COOLDOWN)
    highest = STAGES[progress.stage].learning_rate
    return FINAL_RATE + (highest - FINAL_RATE) * min(warm, cool)


def _report(progress: Progress, done: float, n_tokens: int) -> None:
    name = STAGES[progress.stage].name
    kinds = ", ".join(f"{k or 'all'} {v:.3f}" for k, v in sorted(progress.by_kind.items()))
    sys.stderr.write(
        f"step {progress.step} {done:5.1%} {progress.elapsed_s / 60:.1f} min, stage {name}: "
        f"accuracy {kinds}, early {progress.early:.3f}, loss {progress.last_loss:.3f}, "
        f"{n_tokens} tokens\n"
    )
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for model, tokenizer and checkpoint"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=90.0, help="training time, resumed time included"
    )
    parser.add_argument(
        "--steps", type=int, help="end after so many steps instead: the same weights every time"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in --out"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    if not args.minutes > 0 or (args.steps is not None and args.steps < 1):
        parser.error("--minutes and --steps must be above 0")
    torch.set_num_threads(args.threads)
    run = Run(args.out, args.seed, args.resume)
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, run.stop)
    run.train(args.minutes, args.steps)
    if run.is_stopped:
        sys.exit(130)


if __name__ == "__main__":
    main()
