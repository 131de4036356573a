"""``blendrag schema encode`` and ``run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands import invoke, save_model

SCHEMA = """<schema name="trip">You plan trips.
<module name="plan">A trip of <param name="days" len="4"/> days to the old town by the river.</module>
<module name="food">They eat fish.</module>
</schema>"""
PROMPT = '<prompt schema="trip"><plan days="3"/><food/> What did the company do?</prompt>'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("schema")
    model = save_model(folder / "model")
    (folder / "trip.xml").write_text(SCHEMA, encoding="utf-8")
    (folder / "ask.xml").write_text(PROMPT, encoding="utf-8")
    return folder, ["--model", str(model), "--store", str(folder / "store")]


def test_modules_are_encoded_once_and_reused_by_prompts(made):
    folder, where = made
    first = invoke("schema", "encode", folder / "trip.xml", *where)
    assert "encoded: 3 modules of trip" in first.stderr.replace("  ", " ")
    assert "stands for parameters" in first.stderr
    again = json.loads(invoke("schema", "encode", folder / "trip.xml", *where, "--json").stdout)
    assert (again["modules"], again["encoded"], again["collected"]) == (3, 0, 0)
    shown = {}
    for positions in ("schema", "blend"):
        for prompt in (PROMPT, folder / "ask.xml"):
            result = invoke(
                "schema", "run", folder / "trip.xml", prompt, *where, "--json",
                "--max-new-tokens", "3", "--positions", positions,
            )  # fmt: skip
            shown[positions] = json.loads(result.stdout)["metrics"]
        assert shown[positions]["new_tokens"] == 3
    assert shown["schema"]["reused_tokens"] > shown["schema"]["fresh_tokens"]
    streamed = invoke("schema", "run", folder / "trip.xml", PROMPT, *where, "--max-new-tokens", "3")
    assert streamed.stdout.strip()
    assert f"{shown['schema']['reused_tokens']} reused" in streamed.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("encode", "none.xml"), "none.xml: No such file or directory; expected a file of markup"),
        (("run", "trip.xml", "none.xml"), "PROMPT none.xml cannot be read (No such file"),
        (("run", "trip.xml", "<prompt schema='trip'><fod/></prompt>"), "did you mean 'food'"),
        (("run", "trip.xml", PROMPT, "--positions", "x"), "positions is 'x', expected 'schema' or"),
    ],
)
def test_bad_input_is_one_sentence(args, sentence, made, monkeypatch):
    folder, where = made
    monkeypatch.chdir(folder)
    result = invoke("schema", *args, *where)
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", "")
