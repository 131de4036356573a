"""``python -m blendrag.lab.training.check``: what it prints and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.lab.training.check import main
from blendrag.lab.training.prompts import FORMS

FEW = ("demo", "--contexts", "1", "--chunks", "2", "--chunk-tokens", "64")


def test_a_line_per_form_mode_and_kind(capsys: pytest.CaptureFixture[str]) -> None:
    main([*FEW, "--forms", "native", "plain"])
    lines = capsys.readouterr().out.splitlines()
    for form in ("native", "plain"):
        for mode in ("full", "reuse"):
            prefix = f"{form}, 2 chunks of 64, {mode}, "
            assert any(line.startswith(prefix) for line in lines)


@pytest.mark.parametrize("folder", ["absent", "."])
def test_a_folder_without_a_model_is_one_sentence(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / folder)])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert str(tmp_path) in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--forms", "foo"), [form.name for form in FORMS]),
        (("--forms", "native", "foo"), ["'foo'"]),
        (("--contexts", "0"), ["'0' is no number above 0"]),
        (("--chunk-tokens", "64", "-1"), ["above 0"]),
    ],
)
def test_what_cannot_be_checked_is_refused_before_the_model_is_loaded(
    wrong: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["absent", *wrong])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in (wrong[0], *words))
