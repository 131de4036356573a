"""The examples of prompt schemas."""

from __future__ import annotations

import re

import example_scripts


def test_the_use_cases_of_prompt_cache_compute_only_what_is_asked(capsys):
    example_scripts.run("prompt_schemas.py")
    printed = capsys.readouterr().out
    computed = re.findall(r"cached: (\d+) of (\d+) tokens computed", printed)
    assert len(computed) == 3
    assert all(int(few) < 0.2 * int(all_of_them) for few, all_of_them in computed)
    for file, tokens in re.findall(r"full: (\d+) of (\d+) tokens computed", printed):
        assert file == tokens
