"""Chunks follow headings and definitions, name what encloses them, and are no crumbs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.text.chunking import Chunk, Chunker
from blendrag.text.outline import outline_of

CHUNKER = Chunker(tiny.tokenizer().backend_tokenizer, 128)
SENTENCE = "The lamp was lit at dusk and nobody knew who had climbed the stairs. "


def chunks_of(text: str, source: str) -> list[Chunk]:
    """The chunks, which together are the text, each within the limit and after its context."""
    chunks, position = CHUNKER.split(text, source), 0
    for chunk in chunks:
        assert not text[position : chunk.start].strip()
        assert chunk.text.endswith(text[chunk.start : chunk.end])
        assert chunk.text == chunk.text.strip() != ""
        assert chunk.tokens == CHUNKER.count(chunk.text) <= CHUNKER.chunk_tokens
        position = chunk.end
    assert not text[position:].strip()
    return chunks


def own_tokens(text: str, chunk: Chunk) -> int:
    return CHUNKER.count(text[chunk.start : chunk.end])


def labels(text: str, source: str) -> list[tuple[int, str]]:
    return [(each.depth, each.label) for each in outline_of(text, source).sections]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a.md", "# Guide\n\n## Install\n\n### Windows\n\n{}\n\n### Linux\n\n{}\n"),
        ("a.rst", "=====\nGuide\n=====\n\nInstall\n=======\n\nWindows\n-------\n\n{}\n\nLinux\n-----\n\n{}"),
        ("notes.jsonl#7", "# Guide\n\n## Install\n\n### Windows\n\n{}\n\n### Linux\n\n{}\n"),
        ("memo", "Guide\n=====\n\nInstall\n-------\n\n### Windows\n\n{}\n\n### Linux\n\n{}\n"),
    ],
)  # fmt: skip
def test_every_chunk_of_a_section_has_the_path_of_its_headings(source: str, text: str) -> None:
    chunks = chunks_of(text.format("Run the setup. " * 60, "Use the package. " * 60), source)
    assert "Guide" in chunks[0].text
    for chunk in chunks:
        place = "Windows" if "setup" in chunk.text else "Linux"
        assert "Install" in chunk.text
        assert place in chunk.text
        assert not ("setup" in chunk.text and "package" in chunk.text)
    assert sum(chunk.text.startswith("Guide > Install > Windows\n\n") for chunk in chunks) > 1


def test_a_heading_is_never_the_end_of_a_chunk() -> None:
    text = "".join(f"# Part {n}\n\n## Detail {n}\n\n{SENTENCE * (n % 9)}\n\n" for n in range(40))
    for chunk in chunks_of(text, "a.md")[:-1]:
        last = chunk.text.rsplit("\n", 1)[-1]
        assert not last.startswith("# ")
        number = last.removeprefix("## Detail ")
        assert not last.startswith("##") or int(number) % 9 == 0  # a section without text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A #\n\n```sh\n# no heading\n```\n\n~~~\n# nor this\n```\n~~~\n## B", [(1, "A"), (2, "B")]),
        ("---\ntitle: x\n---\n\nA\n===\n\n- item\n---\n\n| a |\n---\n", [(1, "A")]),
        ("#no\n\n#\n\n####### no\n\n    # no\n\n   ###### F", [(6, "F")]),
        ("Two lines\nof text\n---\n\ntext `a`\n\n`` ``` ``\n\n# B", [(1, "B")]),
    ],
)  # fmt: skip
def test_headings_of_markdown_are_those_outside_of_code(text: str, expected: object) -> None:
    assert labels(text, "a.md") == expected


def test_comments_and_rules_of_other_texts_are_no_headings() -> None:
    assert not labels("# a comment\nname = 1\n\n# another\n\nx", "settings.toml")
    assert not labels("# a comment\nname = 1\n\n# another\n\nx", "without suffix")


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (
            "a.py",
            "import os\n\n@decorated(\n    1,\n)\nclass A(B):\n    def f(\n        self,\n    ) -> int:\n"
            '        """One\ndef no():\n        """\n        return 1\n\n    x = 2\n\n'
            "async def g(): pass\n\ny = 3\n",
            [(1, "class A(B):"), (2, "def f("), (2, ""), (1, "async def g(): pass"), (1, "")],
        ),
        (
            "a.ts",
            "export default class A {\n  private run(x: number): void {\n    if (x) {\n    }\n  }\n}\n\n"
            "export const f = async (x) => {\n};\n",
            [(1, "export default class A"), (2, "private run(x: number): void"),
             (1, "export const f = async (x) =>")],
        ),
        (
            "a.c",
            "#include <a.h>\n\n/* Adds.\n * Two. */\nstatic int add(int a, int b)\n{\n    go(a,\n"
            "       b);\n}\nint x;\n",
            [(1, "static int add(int a, int b)"), (1, "")],
        ),
        ("a.go", "package a\n\nfunc (s *S) Run() {\n\tgo f()\n}\n\ntype S struct {\n}\n",
         [(1, "func (s *S) Run()"), (1, "type S struct")]),
        ("a.rs", "#[derive(Debug)]\npub(crate) struct S {\n}\n\nimpl S {\n    fn a() {}\n}\n",
         [(1, "pub(crate) struct S"), (1, "impl S"), (2, "fn a() {}")]),
        ("A.java", "@Entity\npublic class A {\n    public int f(int a) {\n        return g(a);\n    }\n}\n",
         [(1, "public class A"), (2, "public int f(int a)")]),
        ("a.rb", "module M\n  class A\n    def f\n    end\n  end\nend\n",
         [(1, "module M"), (2, "class A"), (3, "def f")]),
        ("a.sh", "set -e\nbuild() {\n  make\n}\nbuild\n", [(1, "build()"), (1, "")]),
    ],
)  # fmt: skip
def test_definitions_of_common_languages_are_found(
    source: str, text: str, expected: object
) -> None:
    assert [(depth, label.strip()) for depth, label in labels(text, source)] == expected


def test_code_is_cut_between_definitions_and_names_file_and_class() -> None:
    methods = "".join(
        f"    @cached\n    def method_{n}(self, value):\n"
        + "        value = value + 1\n" * (n % 3 + 1)
        for n in range(30)
    )
    begin = '"""A module."""\n\nimport os\n\n\nclass Lamp:\n    """A lamp."""\n\n'
    text = f"{begin}{methods}\n\ndef last():\n    pass\n"
    chunks = chunks_of(text, "/home/me/lamp.py")
    assert all(chunk.text.startswith("lamp.py\n") for chunk in chunks)
    for n in range(30):
        whole = f"def method_{n}(self, value):\n" + "        value = value + 1\n" * (n % 3 + 1)
        holding = next(chunk for chunk in chunks if f"method_{n}(" in chunk.text)
        assert f"    @cached\n    {whole.rstrip()}" in holding.text
        assert "class Lamp:\n" in holding.text.partition("    @cached")[0]


def test_pieces_of_a_long_function_begin_with_its_line() -> None:
    text = "class A:\n    def f(self):\n" + "        call(self.first, self.second)\n\n" * 60
    first, *rest = chunks_of(text, "a.py")
    assert first.text.startswith("a.py\nclass A:\n    def f(self):\n        call(")
    assert len(rest) > 2
    begin = "a.py\nclass A:\n    def f(self):\n        call("
    assert all(chunk.text.startswith(begin) for chunk in rest)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a.txt", SENTENCE * 60 + "\n\nThe end."),
        ("a.txt", (SENTENCE * 6 + "\n\n") * 9 + "The end."),
        ("a.md", f"# A\n\n{SENTENCE * 20}\n\n# B\n\nShort.\n\n# C\n\n{SENTENCE * 20}\n\n## D\n\nEnd."),
        ("a.md", f"Hello.\n\n# A\n\n{SENTENCE * 30}"),
        ("a.csv", "sku,price\n" + "".join(f"P-{n:04},{n}.50\n" for n in range(97))),
    ],
)  # fmt: skip
def test_no_chunk_is_a_crumb(source: str, text: str) -> None:
    chunks = chunks_of(text, source)
    assert len(chunks) > 2
    assert min(own_tokens(text, chunk) for chunk in chunks) >= CHUNKER.chunk_tokens // 8


def test_long_headings_take_at_most_a_quarter_of_a_chunk() -> None:
    text = "".join(f"{'#' * n} {n} {'long heading ' * 40}\n\n" for n in range(1, 7)) + SENTENCE * 40
    for chunk in chunks_of(text, "a.md"):
        assert CHUNKER.count(chunk.text) - own_tokens(text, chunk) <= CHUNKER.chunk_tokens // 4


def test_a_text_without_outline_is_cut_into_exact_substrings() -> None:
    text = (SENTENCE * 3 + "\n\n") * 20
    assert all(each.text == text[each.start : each.end] for each in chunks_of(text, "a.txt"))
    headed = f"# A\n\n{text}"
    plain = CHUNKER.split(headed, "a.md", with_context=False)
    assert all(each.text == headed[each.start : each.end] for each in plain)


LINES = st.lists(
    st.sampled_from(
        ["# a", "## b c", "===", "---", "```", "", "text of a line", "  def f(x):", "class A {", "}", '"""',
         "@d(", "\tx = 1", "| a | b |", "|---|---|", " ", "\x1c", "word " * 40, "x" * 300, "# " + "y" * 300]
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(LINES, st.sampled_from(["a.md", "a.rst", "a.py", "a.c", "a"]))
def test_odd_outlines_are_split_without_loss(lines: list[str], source: str) -> None:
    chunks_of("\n".join(lines), source)


@pytest.mark.parametrize(
    ("source", "unit"),
    [
        ("a.md", "# h\n"),
        ("a.md", "#" * 40),
        ("a.md", "a\n---\n\n"),
        ("a.rst", "a\n===\n"),
        ("a.py", "def f(): pass\n"),
        ("a.py", '"""'),
        ("a.py", "   b,\n\n"),
        ("a.c", "f("),
    ],
)
def test_the_work_grows_with_the_text(
    source: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that are tokenized, for a text and for one four times as long."""
    seen: list[int] = []
    chunker = Chunker(tiny.tokenizer().backend_tokenizer, 128)
    count = chunker._count
    monkeypatch.setattr(chunker, "_count", lambda text: seen.append(len(text)) or count(text))
    work = []
    for size in (2_000, 8_000):
        seen.clear()
        chunker.split("@a(\n" * (unit[0] == " ") + unit * (size // len(unit)), source)
        work.append(sum(seen))
    assert work[1] < 6 * work[0]
