"""Loading by name works, or says in one sentence why not."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import tiny
from blendrag.config import absolute_model
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError, ModelLoadError
from blendrag.model import loading
from blendrag.model.loading import load_adapter, load_context_tokens, load_tokens
from blendrag.model.sharing import loaded_once


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)


def test_a_path_is_made_absolute_and_hides_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "model"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "./model", Path("model"), "~/model"):
        assert absolute_model(name) == str(tmp_path / "model")
    assert absolute_model("./demo") == absolute_model(Path("demo")) == str(tmp_path / "demo")
    for name in ("demo", "nobody/nothing"):
        assert absolute_model(name) == name


def test_the_context_window_is_known_without_the_weights(checkpoint: str) -> None:
    (Path(checkpoint) / "model.safetensors").unlink()
    assert load_context_tokens(checkpoint) == tiny.adapter(tiny.llama()).context_tokens == 4096


def test_no_garbage_is_collected_while_something_is_loaded() -> None:
    collecting: list[bool] = []

    class Loaded:
        def __init__(self) -> None:
            collecting.append(gc.isenabled())

    loaded_once("anything", Loaded)
    assert [*collecting, gc.isenabled()] == [False, True]


def test_the_tokenizers_are_read_once_for_the_corpus_and_the_model(checkpoint: str) -> None:
    with tiny.counted(loading, "_tokenizer") as reads, tiny.counted(json, "loads") as parsed:
        tokens = load_tokens(checkpoint)
        written = tokens.tokenizer.backend_tokenizer.to_str()
        assert load_adapter(checkpoint).tokens is tokens
    assert len(reads) == 1
    assert written not in [args[0] for args in parsed]  # large vocabularies take seconds
    Path(checkpoint, "tokenizer.json").touch()  # other files are read again
    assert load_tokens(checkpoint) is not tokens


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_model_without_a_forward_of_the_whole_is_refused_with_what_to_load_instead(
    checkpoint: str, kind: str
) -> None:
    Path(checkpoint, "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelLoadError, match=f"no forward of {kind} as a whole; .* its thinker"):
        load_adapter(checkpoint)


def test_an_argument_that_from_pretrained_refuses_is_one_sentence(checkpoint: str) -> None:
    with pytest.raises(ModelLoadError, match=r"refuses one of model_kwargs: .*max_length_of_all"):
        load_adapter(checkpoint, model_kwargs={"max_length_of_all": 64})


def test_a_corpus_of_other_model_kwargs_is_not_taken_for_the_same(
    checkpoint: str, tmp_path: Path
) -> None:
    plain, given = (
        BlendEngine(checkpoint, tmp_path / "s", model_kwargs=kwargs)
        for kwargs in (None, {"attn_implementation": "eager"})
    )
    with plain, given:
        assert plain.kv_namespace.model.signature()
        assert not given.kv_namespace.model.signature()
        assert plain.adapter is not given.adapter


MODEL, ADAPTER = "is a directory but not a loadable", r"adapter .* cannot be loaded: "
OBJECT, DAMAGED = "is a .*, expected a JSON object", r"model\.safetensors is damaged"
BROKEN: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("model/config.json", lambda data: b"null", OBJECT),
    ("model/config.json", lambda data: data.replace(b'_size": 32', b'_size": "x"'), MODEL),
    ("model/model.safetensors", lambda data: data[:50], DAMAGED),
    ("model/tokenizer.json", lambda data: b"[]", MODEL),
    ("lora/adapter_model.safetensors", lambda data: data[:-10], DAMAGED),
    ("lora/adapter_config.json", lambda data: b"[]", OBJECT),
    ("lora/adapter_config.json", lambda data: b'{"peft_type": "NOPE"}', ADAPTER),
]


def test_a_broken_file_is_one_sentence(checkpoint: str) -> None:
    lora = Path(checkpoint).parent / "lora"
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    get_peft_model(tiny.llama(), config).save_pretrained(lora)
    assert load_adapter(checkpoint, lora=str(lora)).identity.adapters
    for name, break_it, words in BROKEN:
        path = Path(checkpoint).parent / name
        whole = path.read_bytes()
        path.write_bytes(break_it(whole))
        with pytest.raises(ModelLoadError, match=words) as caught:
            load_adapter(checkpoint, lora=str(lora))
        assert tiny.one_sentence(str(caught.value))
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError("not there"), r"is not a local directory and .*\(not there\)"),
        (ValueError("unknown model type"), "was found but is not a loadable causal LM: unknown"),
        (RuntimeError("size mismatch"), "was found but is not a loadable causal LM: size mismatch"),
        (ImportError("needs sentencepiece"), "needs a package that is not installed: needs sent"),
    ],
)
def test_an_error_about_a_hub_id_says_what_happened(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    failing(monkeypatch, error)
    for load in (load_adapter, load_tokens):
        with pytest.raises(ModelLoadError, match=sentence):
            load("somebody/model")


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "a/b/c", ""])
def test_a_path_where_there_is_nothing_is_not_looked_up_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    failing(monkeypatch, OSError("asked the hub"))
    for load in (load_adapter, load_tokens, load_context_tokens):
        with pytest.raises(
            ModelLoadError, match=f"there is no model '{name}'; expected a"
        ) as caught:
            load(name)
        assert tiny.one_sentence(str(caught.value))


def test_a_cached_model_with_a_file_missing_is_not_called_unknown(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, OSError("no file named model.safetensors"))
    cached = str(Path(checkpoint) / "config.json")
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda *args: cached)
    with pytest.raises(ModelLoadError, match=r"was found but .*: no file named model\.safetensors"):
        load_adapter("somebody/model")


def test_a_failed_move_to_the_device_says_so(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("CUDA error: device busy")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", refuse)
    with pytest.raises(ModelLoadError, match="cannot be moved to cpu: CUDA error"):
        load_adapter(checkpoint, device="cpu")


@pytest.fixture
def half(checkpoint: str) -> str:
    tiny.llama().to(torch.bfloat16).save_pretrained(checkpoint)
    return checkpoint


def test_auto_is_the_checkpoints_dtype_or_float32_on_a_cpu_without_fast_products(
    half: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_fast_products", lambda dtype, device: True)
    assert load_adapter(half).identity.compute_dtype == "bfloat16"
    monkeypatch.setattr(loading, "has_fast_products", lambda dtype, device: dtype.itemsize > 2)
    with caplog.at_level("INFO", "blendrag.model.loading"):
        adapter = load_adapter(half)
    assert "no fast products in bfloat16" in caplog.text
    named = load_adapter(half, dtype="float32")
    assert adapter.identity == named.identity
    assert adapter.model.dtype == adapter.model.config.dtype == torch.float32
    assert load_adapter(half, dtype="bfloat16").identity.compute_dtype == "bfloat16"


def test_fast_products_on_a_cpu_are_those_of_onednn() -> None:
    cpu = torch.device("cpu")
    assert loading.has_fast_products(torch.float32, cpu)
    assert loading.has_fast_products(torch.bfloat16, torch.device("cuda"))
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert loading.has_fast_products(torch.bfloat16, cpu) == supported


def test_another_kind_of_cpu_is_another_signature(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = set()
    for fast in (True, False):
        monkeypatch.setattr(loading, "has_fast_products", lambda *a, fast=fast: fast)
        with BlendEngine(half, store=Path(half, "store"), device="cpu") as engine:
            signatures.add(engine.kv_namespace.model.signature())
    assert len(signatures) == 2


# -- models that read images ------------------------------------------------------------------------


def saved(model: Any, root: Path, **template: Any) -> str:
    """A directory with ``model``, and a tokenizer without a template."""
    words = tiny.tokenizer()
    words.chat_template = None
    for part in (model, words):
        part.save_pretrained(root)
    for name, text in template.items():
        (root / f"{name}.json").write_text(json.dumps({name: text}))
    return str(root)


@pytest.mark.parametrize("name", sorted({*tiny.READ_IMAGES} - tiny.ALIKE))
def test_a_model_that_reads_images_answers_text_over_stored_kv(name: str, tmp_path: Path) -> None:
    model = tiny.family(name, initializer_range=0.2)
    model.generation_config.eos_token_id = [1, 2]
    path = saved(model, tmp_path / name, chat_template=tiny.CHAT_TEMPLATE)
    Path(path, "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    made = load_adapter(path, dtype="float32")
    assert (made.refusal, made.context_tokens) == (None, 4096)
    given = {"chunk_tokens": 128, "max_new_tokens": 6, "learn": False, "dtype": "float32"}
    with BlendEngine(path, tmp_path / "store", **given) as engine:
        engine.kv_namespace.corpus.__dict__["embedder"] = tiny.WordEmbedder()
        engine.ingest([tiny.document(0)]).whole()
        asked = [{"role": "user", "content": tiny.prompt(engine, 0)}]
        blended = engine.generate(asked, ratio=1.0)
        assert blended.metrics.reused_tokens > 50
        ids = torch.tensor([engine.segments(asked).ids])
        stock = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        words = engine.tokens.tokenizer
        said = words.decode(stock, skip_special_tokens=True)
        assert blended.text.rstrip("\ufffd") == said.rstrip("\ufffd")  # half a character


@pytest.mark.parametrize(("name", "level"), [("llama4", "whole"), ("qwen3_vl", "text")])
def test_a_head_is_the_embedding_if_either_level_of_a_config_says_so(
    name: str, level: str, tmp_path: Path
) -> None:
    """transformers looks at the text part's for the one and at the whole model's for the other."""
    path = Path(saved(tiny.family(name), tmp_path))
    weights = load_file(path / "model.safetensors")
    heads = [weight for weight in weights if weight.endswith("lm_head.weight")]
    for head in heads:
        del weights[head]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights, such as lm_head\.weight"):
        load_adapter(str(path))
    config = json.loads((path / "config.json").read_text())
    (config if level == "whole" else config["text_config"])["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    made = load_adapter(str(path)).model
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight


@pytest.mark.parametrize("level", ["whole", "text"])
def test_a_quantisation_is_named_at_either_level_of_a_config(level: str, tmp_path: Path) -> None:
    path = Path(saved(tiny.family("qwen3_vl"), tmp_path))
    config = json.loads((path / "config.json").read_text())
    part = config if level == "whole" else config["text_config"]
    part["quantization_config"] = {"bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="is quantised by an unnamed method and cannot be"):
        load_adapter(str(path))


def test_a_model_whose_encoder_reads_the_prompt_is_refused_in_one_sentence() -> None:
    given = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 640}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**given))
    with pytest.raises(
        InvalidInputError, match="whose encoder reads the prompt; expected a causal"
    ):
        tiny.adapter(model)


def test_what_is_wrong_with_a_checkpoint_is_not_cut_at_a_colon(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "error for validator 'x':\n\n  ValueError: layers are 3": "'x': ValueError: layers are 3",
        "it is broken:": "it is broken",
        "first\nsecond": "first",
    }
    for text, expected in texts.items():
        failing(monkeypatch, ValueError(text))
        with pytest.raises(ModelLoadError) as raised:
            load_adapter(checkpoint)
        assert str(raised.value).endswith(expected)


#: As those of SmolVLM and LLaVA: contents are lists of parts, and a text shows nothing.
PARTS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_a_template_that_shows_only_parts_shows_texts(tmp_path: Path) -> None:
    tokens = load_tokens(saved(tiny.llama(), tmp_path, chat_template=PARTS))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert tokens.render(messages) == (
        "<|start|>user\nHi<|end|>\n<|start|>assistant\nHello<|end|>\n<|start|>assistant\n"
    )
    tokens.tokenizer.chat_template = tiny.CHAT_TEMPLATE
    assert "user\nHi<|end|>" in tokens.render(messages)


@pytest.mark.parametrize("template", [["x"], None, 7])
def test_a_file_that_holds_no_template_is_left_aside(tmp_path: Path, template: Any) -> None:
    assert not load_tokens(saved(tiny.llama(), tmp_path, chat_template=template)).has_template
