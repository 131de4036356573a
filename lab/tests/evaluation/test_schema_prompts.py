"""``blendrag eval --schema``: the chunks of a case as modules of a prompt schema."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter
from blendrag_lab.evaluation.arena import Arena
from blendrag_lab.evaluation.asking import Wording
from blendrag_lab.evaluation.rows import ArenaRow
from blendrag_lab.evaluation.schema_prompts import add_schemas, schema_prompt
from blendrag_lab.evaluation.ways import PLACED, make_ways
from blendrag_lab.synthetic.samples import CONTEXT, QUESTION
from cli.commands import refused
from lab.tests.evaluation import lab

WORDING = Wording(f"Answer.\n\n{CONTEXT}\n\nQuestion: {QUESTION}")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, float], ArenaRow]:
    ways = make_ways(["reuse", *PLACED, "query"], ["constant"], [0.3, 1.0], [True])
    data = lab.dataset(lab.cases(1, 2))
    arena = Arena(lab.adapter(), data, ways, max_new_tokens=4, as_schema=True)
    return {(row.policy, row.ratio): row for row in arena.run() if row.kind == "all"}


def test_modules_are_loaded_and_blended_modules_recomputed(rows):
    full, everything = rows["full", 1.0], rows["query", 1.0]
    assert (full.token_kl, full.charged_ratio) == (0.0, 1.0)
    assert everything.token_kl == pytest.approx(0.0, abs=1e-4)
    assert rows["schema", 0.0].charged_ratio == rows["scaffold", 0.0].charged_ratio == 0.0
    assert 0.2 < rows["query", 0.3].charged_ratio < 0.5


def test_modules_are_encoded_alone_or_together(rows):
    alone, together, reuse = (rows[way, 0.0] for way in (*PLACED, "reuse"))
    assert len({alone.token_kl, together.token_kl, reuse.token_kl, 0.0}) == 4
    assert together.recovered == pytest.approx(1 - together.token_kl / reuse.token_kl)
    assert alone.token_kl_error > 0.0


@pytest.mark.parametrize("template", [None, tiny.CHAT_TEMPLATE])
def test_the_prompt_reads_as_instruction_chunks_and_question(tmp_path, template):
    made = tiny.adapter(tiny.llama())
    made.tokens.tokenizer.chat_template = template
    (case,) = lab.cases(1, 1)
    case = replace(case, question="Is 1 < 2?")
    with BlendEngine(ModelAdapter(made.model, made.tokens.tokenizer), tmp_path) as engine:
        add_schemas(engine, case.chunks, WORDING)
        text = engine.adapter.tokens.decode(
            engine.segments(schema_prompt(case, case.chunks, WORDING, "full")).ids
        )
        first, second, third = case.chunks
        context = f"Answer.\n\n{first}\n\n{second}\n\n{third}\n\n"
        if template is None:
            assert text.endswith(context + "Question: Is 1 < 2?")
        else:
            messages = [
                {"role": "system", "content": context},
                {"role": "user", "content": "Question: Is 1 < 2?"},
            ]
            assert text == engine.adapter.tokens.render(messages)
        nothing = engine.segments(schema_prompt(case, (), WORDING, "none"))
        assert first not in engine.adapter.tokens.decode(nothing.ids)


def test_a_chat_and_ways_of_other_prompts_are_refused():
    case = replace(lab.cases(1, 1)[0], history=(("Who?", "She."),))
    with pytest.raises(InvalidInputError, match="cases of a chat"):
        Arena(lab.adapter(), lab.dataset([case]), make_ways([], [], [], []), as_schema=True)
    assert "add --schema" in refused("eval", "--policies", "schema")
    assert "leave it out" in refused("eval", "--schema", "--policies", "prefix")
