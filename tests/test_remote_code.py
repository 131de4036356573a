"""Python files in a model's directory are run only with trust_remote_code, whatever stdin answers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import ModelLoadError
from blendrag.frameworks.fields import EngineFields
from blendrag.model.loading import load_adapter, load_context_tokens, load_tokens
from cli.commands import invoke, refused, said

OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_code"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists after the code of :func:`own_code` was run."""
    return tmp_path / "code was run"


@pytest.fixture
def own_code(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model directory with Python code; stdin answers every question with yes."""
    folder = tmp_path / "own"
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    change(
        folder / "config.json",
        model_type="own_code",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
    )
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    load_context_tokens.cache_clear()
    return str(folder)


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("load", [load_adapter, load_tokens, load_context_tokens])
def test_code_is_refused_even_if_stdin_says_yes(load, own_code, marker):
    with tiny.refuses("trust_remote_code=True", ModelLoadError):
        load(own_code)
    assert not marker.exists()


def test_a_command_runs_code_only_with_its_option(own_code, marker):
    result = invoke("verify", own_code, stdin="y\n" * 50)
    assert result.exit_code == 2
    assert "--trust-remote-code" in said(result)
    assert not marker.exists()
    trusting = invoke("verify", own_code, "--trust-remote-code")
    assert trusting.exit_code == 0, trusting.output
    assert marker.exists()


def test_an_engine_that_trusts_the_code_runs_it(own_code, marker, tmp_path):
    with BlendEngine(own_code, tmp_path / "s", device="cpu", trust_remote_code=True) as engine:
        answer = engine.generate("hello there", Options(mode="full", max_new_tokens=2))
        assert answer.metrics.new_tokens > 0
    assert marker.exists()
    assert load_context_tokens(own_code, trust_remote_code=True) == 4096


@pytest.mark.parametrize("command", [["ask", "why?"], ["calibrate"], ["profile"]])
def test_trusting_code_requires_naming_the_model(command, tmp_path):
    args = (*command, "--store", str(tmp_path), "--trust-remote-code")
    assert "without a model" in refused(*args)


def test_wrappers_trust_code_only_if_told_to(own_code, tmp_path):
    with EngineFields(model=own_code, store=tmp_path / "s") as careful:
        assert not careful.engine.kv_namespace.model.trust_remote_code
        with pytest.raises(ModelLoadError, match="trust_remote_code=True"):
            _ = careful.engine.tokens
        with EngineFields(model=own_code, store=tmp_path / "s", trust_remote_code=True) as trusting:
            assert trusting.engine is not careful.engine
            assert trusting.engine.tokens.decode([5])
            with pytest.raises(ValueError, match="leave trust_remote_code out"):
                EngineFields(engine=trusting.engine, trust_remote_code=True)


def test_code_of_an_embedder_runs_only_if_trusted(own_code, marker, tmp_path):
    embedder = tmp_path / "embedder"
    (embedder / "0_part").mkdir(parents=True)
    part = {"idx": 0, "name": "0", "path": "0_part", "type": "own.OwnTokenizer"}
    (embedder / "modules.json").write_text(json.dumps([part]))
    (embedder / "own.py").write_text(Path(own_code, "own.py").read_text())
    with BlendEngine("demo", tmp_path / "s", embedder=str(embedder)) as careful:
        with pytest.raises(ModelLoadError, match="trust_remote_code"):
            careful.kv_namespace.corpus.embedder.embed(["a"])
        assert not marker.exists()
    with (
        BlendEngine(
            "demo", tmp_path / "s", embedder=str(embedder), trust_remote_code=True
        ) as trusting,
        pytest.raises(ModelLoadError),  # the code is not an embedder
    ):
        trusting.kv_namespace.corpus.embedder.embed(["a"])
    assert marker.exists()
