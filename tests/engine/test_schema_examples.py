"""The examples of prompt schemas."""

from __future__ import annotations

import re

import example_scripts
from blendrag.engine import BlendEngine


def test_the_embedded_model_answers_from_cached_modules(capsys):
    example_scripts.run("prompt_schemas.py", "demo")
    printed = capsys.readouterr().out
    assert len(re.findall(r"(cached|full): .*'skating'", printed)) == 2


def test_the_use_cases_of_prompt_cache_compute_only_what_is_asked(tmp_path, capsys):
    example = example_scripts.load("prompt_schemas.py")
    with BlendEngine("demo", tmp_path, max_new_tokens=4) as engine:
        for file, prompt in example.PROMPTS.items():
            example.show(engine, file, prompt)
    printed = capsys.readouterr().out
    computed = re.findall(r"cached: (\d+) of (\d+) tokens computed", printed)
    assert len(computed) == 3
    assert all(int(few) < 0.2 * int(all_of_them) for few, all_of_them in computed)
    for file, tokens in re.findall(r"full: (\d+) of (\d+) tokens computed", printed):
        assert file == tokens


def test_the_page_on_schemas_runs_as_printed(tmp_path, monkeypatch, capsys):
    page = (example_scripts.EXAMPLES.parent / "docs/schemas.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/schemas.md", "exec"), {})
    *_, reused, fresh = capsys.readouterr().out.split()
    assert int(reused) > 2 * int(fresh)
