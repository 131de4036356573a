"""The ids of a prompt's segments decode to the prompt, for every kind of tokenizer; BOS comes once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.model.tokens import Definition, Tokens
from blendrag.text.matches import Match
from blendrag.text.prompt import segment_prompt
from blendrag.text.recognition import ChunkIndex, chunk_hashes

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
TEXTS = [tiny.TEXT, *(tiny.sentence(i) for i in range(20)), "[INST] Context: two  spaces [/INST]"]
TEMPLATE = (
    "<s>{% for m in messages %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}[/INST]"
)


def train(backend: Tokenizer, kind: Any, texts: Sequence[str] = (), **options: Any) -> Tokenizer:
    trainer = kind(special_tokens=SPECIAL, show_progress=False, **options)
    backend.train_from_iterator([*TEXTS, *texts], trainer)
    return backend


@lru_cache
def bpe(prefix: str) -> str:
    """A BPE with byte fallback and ``▁`` for spaces, trained with or without a space before texts."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    scheme = "always" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    definition = json.loads(train(backend, trainers.BpeTrainer, vocab_size=500).to_str())
    model = definition["model"]
    model |= {"byte_fallback": True, "fuse_unk": True}
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    return json.dumps(definition)


def with_template(made: Any) -> Any:
    made.chat_template = TEMPLATE
    return made


def fast(backend: Tokenizer) -> Any:
    return with_template(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
            extra_special_tokens=["<|user|>", "<|end|>"],
        )
    )  # fmt: skip


UNDO = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def llama2() -> Any:
    """As Llama 2, TinyLlama and Mistral 0.1 and 0.2: a space before every piece of text."""
    backend = Tokenizer.from_str(bpe("▁"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence([*UNDO, decoders.Strip(" ", 1, 0)])
    return fast(backend)


def llama_of_transformers_5() -> Any:
    """A space before the first piece of text: ``Metaspace`` with ``first``."""
    model = json.loads(bpe("▁"))["model"]
    made = LlamaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=["<|user|>", "<|end|>"],
    )
    return with_template(made)


def mistral_v3() -> Any:
    """``Metaspace`` with ``always``, texts split at spaces."""
    backend = Tokenizer.from_str(bpe("▁"))
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    backend.decoder = decoders.Sequence([*UNDO, decoders.Strip(" ", 1, 0)])
    return fast(backend)


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    train(backend, trainers.UnigramTrainer, ["\n()<>|,/_-"], vocab_size=300, unk_token="<unk>")
    backend.decoder = decoders.Metaspace("▁", prepend_scheme="first")
    return fast(backend)


def gemma() -> Any:
    """Spaces become ``▁``, and no space is put anywhere; line breaks are added tokens."""
    backend = Tokenizer.from_str(bpe(""))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(UNDO)
    made = fast(backend)
    made.add_tokens(["\n", "\n\n", "<table>"])
    return made


def byte_level_with_a_space() -> Any:
    """GPT-2's kind with ``add_prefix_space``."""
    made = tiny.tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def qwen() -> Any:
    """Byte-level, cut as by Qwen 2 and Llama 3: punctuation merges with the line breaks after it."""
    backend = Tokenizer(models.BPE())
    cut = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(cut, "isolated"), pieces])
    backend.decoder = decoders.ByteLevel()
    alphabet = pieces.alphabet()
    train(backend, trainers.BpeTrainer, [".\n\n" * 99], vocab_size=600, initial_alphabet=alphabet)
    return fast(backend)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": tiny.tokenizer,
    "Qwen": qwen,
    "byte-level with a space": byte_level_with_a_space,
    "Llama 2": llama2,
    "Llama of transformers 5": llama_of_transformers_5,
    "Mistral": mistral_v3,
    "Unigram": unigram,
    "Gemma": gemma,
}
#: Kinds that put a space after control tokens, too, as the models have learned.
SPACE_BEHIND_CONTROL = ("Llama 2", "Mistral", "byte-level with a space")
CHUNKS = {
    "plain": " ".join(tiny.sentence(i) for i in range(3)),
    "pages": "\n\n".join(tiny.sentence(i) for i in range(5, 8)),
    "indented": f"(1)  {tiny.sentence(9)}\n   {tiny.sentence(10)}",
    "control": f"A chunk that says <|end|><|user|>, </s><s>. So it goes. {tiny.sentence(11)}",
}


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokens(kind: str) -> Tokens:
    return Tokens(KINDS[kind]())


INDEX = ChunkIndex(CHUNKS.__getitem__)
INDEX.add({name: chunk_hashes(text) for name, text in CHUNKS.items()})


def planned(tokens: Tokens, rendered: str) -> Any:
    return segment_prompt(
        rendered, INDEX.find(rendered), tokens, lambda name: tuple(tokens.encode_text(CHUNKS[name]))
    )


def decoded(kind: str, tokens: Tokens, plan: Any) -> str:
    """Without the spaces that this kind's stock tokenizer puts into every prompt."""
    said = tokens.decode(plan.ids)
    if kind == "byte-level with a space":
        said = said.removeprefix(" ")
    if kind in SPACE_BEHIND_CONTROL:
        for control in tokens.special_texts:
            said = said.replace(f"{control} ", control)
    return said


SEPARATORS = ["\n\n", " ", "  ", " [1] ", "(", "<|end|>\n<|user|>\n"]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_decoded_ids_are_the_rendered_prompt(kind, tokens, separator):
    texts = [*CHUNKS.values(), CHUNKS["plain"][:150], "Question: what did it build? Answer:"]
    rendered = f"Answer the question.{separator}{separator.join(texts)}{separator}The end"
    plan = planned(tokens, rendered)
    assert [s.chunk_id for s in plan.chunks] == [*CHUNKS, "plain"]
    assert decoded(kind, tokens, plan) == rendered


@pytest.mark.parametrize("separator", ["\n\n", "\n---\n", "\n"])
def test_ids_are_those_of_the_stock_tokenizer(kind, tokens, separator):
    """Also where the end of a chunk merges with the text after it.

    Gemma's line breaks are added tokens, which chunk text is encoded without: not its ``pages``.
    """
    names = ("plain",) if kind == "Gemma" else ("plain", "indented", "pages", "plain")
    for loaded in ([], [CHUNKS[name] for name in names]):
        content = separator.join(["Who built  ships?", *loaded, "What?"])
        rendered = tokens.render([{"role": "user", "content": content}])
        plan = planned(tokens, rendered)
        assert list(plan.ids) == tokens.tokenizer.encode(rendered, add_special_tokens=False)
        assert [segment.text for segment in plan.chunks] == loaded
        for segment in plan.chunks:
            assert segment.complete
            assert 0 <= len(segment.stored_ids) - len(segment.ids) < 3
            assert segment.ids == segment.stored_ids[: len(segment.ids)]


def test_a_definition_is_taken_apart_and_put_together_without_its_vocabulary():
    backend = tiny.tokenizer().backend_tokenizer
    backend.add_tokens(['"model":{}', "é"])
    written = backend.to_str()
    definition = Definition.parse(written)
    whole = json.loads(written)
    assert definition.parts == {name: whole[name] for name in whole if name != "model"}
    assert json.loads(definition.model) == whole["model"]
    assert definition.tokenizer().to_str() == written


def test_plain_text_shares_the_vocabulary_of_the_stock_tokenizer_and_leaves_it_as_it_is(
    monkeypatch,
):
    stock, read = tiny.tokenizer(), []
    written, parse = stock.backend_tokenizer.to_str(), Tokenizer.from_str

    def counted(definition: str) -> Tokenizer:
        read.append(definition)
        return parse(definition)

    monkeypatch.setattr("blendrag.model.tokens.Tokenizer", SimpleNamespace(from_str=counted))
    plain = json.loads(Tokens(stock).text.to_str())
    assert stock.backend_tokenizer.to_str() == written
    assert plain["model"] == json.loads(written)["model"]
    assert plain["added_tokens"] == []
    assert not [text for text in read if len(text) > len(written) / 2]


def test_an_end_that_merges_with_the_separator_is_computed():
    tokens = Tokens(qwen())
    plan = planned(tokens, f"Read:\n\n{CHUNKS['plain']}\n\nWhat?")
    (chunk,) = plan.chunks
    assert len(chunk.stored_ids) - len(chunk.ids) == 1
    assert tokens.decode(plan.ids[chunk.end : chunk.end + 1]) == ".\n\n"


@pytest.mark.parametrize("tail", ["<|end|>", "<|en", "</s>."])
def test_control_text_at_the_end_of_a_chunk_stays_text(kind, tokens, tail):
    """Even if the text after the chunk completes it."""
    chunk = f"{CHUNKS['plain']} {tail}"
    rendered = f"The\n\n{chunk}d|>\n\nThe end"
    match = Match("c", 5, 5 + len(chunk), complete=True)
    plan = segment_prompt(rendered, [match], tokens, lambda _: tuple(tokens.encode_text(chunk)))
    assert plan.chunks[0].ids == plan.chunks[0].stored_ids
    assert not tokens.special_among(plan.ids) & set(
        tokens.tokenizer.convert_tokens_to_ids(SPECIAL[1:])
    )
    assert decoded(kind, tokens, plan).removeprefix(" ") == rendered


# -- BOS ----------------------------------------------------------------------------------------

BOS = "<|bos|>"


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine whose tokenizer adds BOS to every text, and whose template writes one."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    assert tokenizer("a")["input_ids"][0] == 0
    root = tmp_path_factory.mktemp("bos") / "s"
    with tiny.engine(tiny.llama(), root, tokenizer=tokenizer, max_new_tokens=1) as made:
        made.ingest([tiny.document(0)])
        yield made


RAW = Options(apply_chat_template=False)
RENDERED = f"{BOS}<|start|>user\n{{}}<|end|>\n<|start|>assistant\n"


def messages(question: str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": question}]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]


WAYS: dict[str, tuple[Callable[[str], Any], Options]] = {
    "a string": (str, Options()),
    "a conversation": (messages, Options()),
    "raw": (str, RAW),
    "raw with BOS": (lambda question: BOS + question, RAW),
    "rendered": (RENDERED.format, RAW),
}


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_begins_with_bos_once(with_bos, way, chunks):
    context = "\n\n".join(tiny.chunk_texts(with_bos, 0)) + "\n\n" if chunks else ""
    make, options = WAYS[way]
    prompt = make(f"{context}What?")
    ids = with_bos.segments(prompt, options).ids
    assert (ids[0], ids.count(0)) == (0, 1)
    metrics = with_bos.generate(prompt, options).metrics
    assert (metrics.reused_tokens > 0) == chunks
    assert not any(BOS in note for note in metrics.notes)


def test_raw_text_gets_no_bos_if_the_tokenizer_adds_none(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine:
        assert 0 not in engine.segments("What?", RAW).ids
        assert engine.segments("What?").ids.count(0) == 1


@pytest.mark.parametrize("as_messages", [False, True])
def test_rendered_text_sent_through_the_template_again_is_noted(with_bos, as_messages):
    rendered = RENDERED.format("What?")
    prompt = [{"role": "user", "content": rendered}] if as_messages else rendered
    (note,) = [n for n in with_bos.generate(prompt).metrics.notes if BOS in n]
    assert "apply_chat_template=False" in note
    assert tiny.one_sentence(note)
