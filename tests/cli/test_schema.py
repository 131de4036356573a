"""``blendrag schema check``, ``show``, ``encode`` and ``run``."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.commands import invoke, refused, save_model

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
    (folder / "utf-16.xml").write_text(SCHEMA, encoding="utf-16")
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
        assert (shown[positions]["mode"], shown[positions]["new_tokens"]) == (positions, 3)
    assert shown["schema"]["reused_tokens"] > shown["schema"]["fresh_tokens"]
    streamed = invoke("schema", "run", folder / "trip.xml", PROMPT, *where, "--max-new-tokens", "3")
    assert streamed.stdout.strip()
    assert f"{shown['schema']['reused_tokens']} reused" in streamed.stderr
    assert "fresh; mode schema" in streamed.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("encode", "none.xml"), "none.xml: No such file or directory; expected a file of markup"),
        (("encode", "utf-16.xml"), "utf-16.xml: not UTF-8; expected a file of markup"),
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


def test_a_schema_and_its_prompts_are_checked(made):
    folder, (_, model, *_) = made
    found = invoke("schema", "check", folder / "trip.xml", folder / "ask.xml", PROMPT)
    assert found.stdout == "trip: 2 modules, 2 prompts, no errors\n"
    assert "lengths were not checked; name a --model" in found.stderr
    invoke("schema", "check", folder / "trip.xml", PROMPT, "--model", model)
    long = PROMPT.replace('"3"', '"one hundred and twenty thousand"')
    invoke("schema", "check", folder / "trip.xml", long)
    for prompt, message in (
        (long, "trip.xml:2:31); shorten it"),
        (
            PROMPT.replace("?", "? Say it." * 1000),
            "expected at most 1,024, the context of the model",
        ),
    ):
        sentence = refused("schema", "check", folder / "trip.xml", prompt, "--model", model)
        assert message in sentence
        assert sentence.startswith("error: <prompt 1>:1:")
    unknown = PROMPT.replace("plan", "plam")
    every = invoke(
        "schema", "check", folder / "trip.xml", unknown, PROMPT, long, *("--model", model)
    )
    assert every.exit_code == 2
    lines = every.stderr.strip().splitlines()
    assert [line.split(":1:")[0] for line in lines] == ["error: <prompt 1>", "error: <prompt 3>"]
    assert "did you mean 'plan'" in lines[0]
    assert "shorten it" in lines[1]
    (folder / "wrong.xml").write_text(
        '<schema name="s">\n<modul/>\n<module name="a"><param name="x"/></module>\n'
        '<module name="a">b</module><scaffold modules="a none"/></schema>',
        encoding="utf-8",
    )
    lines = invoke("schema", "check", folder / "wrong.xml").stderr.splitlines()
    assert [line.split("wrong.xml:")[1].split(" ")[0] for line in lines] == [
        "2:1:",
        "3:18:",
        "4:1:",
    ]
    assert "<modul> is no tag of a schema" in lines[0]
    assert "'a' exists in line 3 already" in lines[2]


def test_schemas_of_a_server_have_different_names(made):
    folder, where = made
    same = folder / "same.xml"
    same.write_text(SCHEMA, encoding="utf-8")
    sentence = refused(
        "serve", "--schema", folder / "trip.xml", "--schema", same, "--port", "0", *where
    )
    assert sentence.endswith("trip.xml, 'trip', expected another name")


def test_a_schema_is_shown_as_a_tree_and_drawn(made):
    folder, (_, model, *_) = made
    shown = invoke("schema", "show", folder / "trip.xml", "--svg", folder / "trip.svg").stdout
    lines = [line.split() for line in shown.splitlines()]
    assert lines == [
        ["trip", "start", "end", "words"],
        ["├──", '"You', "plan", 'trips."', "0", "3", "3"],
        ["├──", "module", "plan", "3", "18", "15"],
        ["│", "├──", '"A', "trip", 'of"', "3", "6", "3"],
        ["│", "├──", "param", "days", "6", "10", "4"],
        ["│", "└──", '"days', "to", "the", "old", "town", "by", "the", 'river."', "10", "18", "8"],
        ["└──", "module", "food", "18", "21", "3"],
        ["└──", '"They', "eat", 'fish."', "18", "21", "3"],
    ]
    drawing = ElementTree.parse(folder / "trip.svg")
    titles = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert "module plan: 3 to 18" in titles
    assert len(titles) == 7
    counted = json.loads(
        invoke("schema", "show", folder / "trip.xml", "--model", model, "--json").stdout
    )
    assert counted["unit"] == "tokens"
    assert counted["length"] > 21
    assert [part["kind"] for part in counted["parts"]].count("module") == 2
    refused = invoke("schema", "show", folder / "trip.xml", "--svg", folder / "none" / "trip.svg")
    assert refused.exit_code == 2
    assert "--svg" in refused.stderr
    assert "cannot be written" in refused.stderr
