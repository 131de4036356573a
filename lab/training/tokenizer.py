"""The demo model's tokenizer: byte-level BPE with a chat template.

The merges are learned from generated text of the training split, the prompt forms, and English from the
standard library's docstrings.
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from blendrag_lab.synthetic.generator import ALIASES, KINDS, WORDS
from blendrag_lab.synthetic.questions import write_context
from blendrag_lab.synthetic.samples import FORMS

SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>")
BOS, END, USER, ASSISTANT, SYSTEM, PAD = SPECIAL_TOKENS
VOCAB_SIZE = 3072
DOCSTRING_CHARACTERS = 600_000

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('the roles are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(seed: int = 0, n_contexts: int = 800) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCAB_SIZE` entries; the same for the same seed and Python version."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, n_contexts), trainer)
    # A bare text gets <|bos|> first, as with Llama's tokenizer; the chat template writes its own.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT, SYSTEM],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        blendrag_names_sources=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _texts(seed: int, n_contexts: int) -> Iterator[str]:
    rng = random.Random(seed)
    for i in range(n_contexts):
        context = write_context(rng, "train", 6, i % 2, 300, len, 1)
        yield from context.chunks
        yield from (f"Question: {q.text}\nAnswer: {q.answer}" for q in context.questions)
    # The words of the forms, of names and of values become single tokens: those bind first.
    for form in FORMS:
        yield from [content for _, content in form.messages] * 100
    pools = [*WORDS.values(), ALIASES]
    for kind in KINDS.values():
        pools += [kind.roles, *(attribute.values for attribute in kind.plain)]
    for words in pools:
        yield from [" " + " ".join(words)] * 300
    yield from _docstrings()


def _docstrings() -> Iterator[str]:
    """English prose that every machine has, in a fixed order, for words beyond the generator's."""
    left = DOCSTRING_CHARACTERS
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                left -= len(text)
                if left < 0:
                    return
                yield text
