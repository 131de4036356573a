"""Change schemas and prompts at random: each is parsed, or refused with a :class:`SchemaError`.

A text that takes longer than :data:`LIMIT_S`, or raises anything else, is a failure. ``make fuzz-schema``
runs it for long.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType

from blendrag.errors import SchemaError
from blendrag.schema.checking import check_lengths, resolve
from blendrag.schema.layout import lay_out
from blendrag.schema.markup import parse_prompt, parse_schema

#: CPU seconds for one text of a few thousand characters.
LIMIT_S = 20.0

SCHEMAS = (
    '<schema name="s">intro <module name="a">a <param name="p" len="2"/> b</module><union>'
    '<module name="b">b</module><module name="c">c<module name="d">d</module></module></union>'
    '<scaffold modules="a b"/></schema>',
    """<schema name="s">
  <system>
    You help.
  </system>
  <user>
    <module name="a">
      Text &amp; <parameter name="p" length="3"/><!-- comment -->
        more <![CDATA[ <raw> ]]>
    </module>
    <module name="unit.py" xml:space="preserve">
def f(): return 1 &lt; 2
</module>
  </user>
</schema>""",
)
PROMPTS = (
    '<prompt schema="s"><a p="x"/>text<c><d/></c>more</prompt>',
    '<prompt schema="s">\n  <a p="two words"/>\n  <unit.py/>\n  <user>\n    Why &lt;?\n  </user>\n</prompt>',
)
PIECES = (
    "<module name='a'>", "</module>", "<union>", "</union>", "<param name='p' len='3'/>", "<user>", "</user>",
    "<schema name='s'>", "</schema>", "<prompt schema='s'>", "<a p=''/>", "<b/>", "<c>", "</c>", "<d/>",
    "<scaffold modules='a d'/>", "<!--", "-->", "<![CDATA[", "]]>", "<!DOCTYPE x [<!ENTITY e 'e'>]>", "&e;",
    "&lt;", "&#10;", "&#0;", "&#x110000;", "<?x y?>", "xml:space='preserve'", "xml:space='x'",
    "len='99999999'", "\n", "  ", "\t", "\r", "\0", "\ud800", "\ufeff", "é", "😀", "<", ">", "&", "'",
    '"', "=", "/", ":", "name", "x" * 500, "<a>" * 80,
)  # fmt: skip


class TooSlow(BaseException):
    """One text took more than :data:`LIMIT_S`."""


@dataclass
class MarkupFuzzReport:
    """What became of the texts."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """``parsed``, ``resolved``, ``refused``, and ``without place`` for an error without file and line."""
    failures: list[str] = field(default_factory=list)


def changed(text: str, draw: random.Random) -> str:
    """``text`` with some changes."""
    for _ in range(draw.choice((1, 1, 2, 6))):
        i, j = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        j = min(j, i + draw.choice((1, 4, 40)))
        kind = draw.randrange(5)
        if kind == 0:
            text = text[:i] + text[j:]
        elif kind == 1:
            text = text[:i] + draw.choice(PIECES) + text[i:]
        elif kind == 2:
            text = text[:i] + draw.choice(PIECES) + text[j:]
        elif kind == 3:
            text = text[:j] + text[i:]
        else:
            at = draw.randrange(len(text) + 1)
            text = text[:at] + text[i:j] + text[at:]
    return text


def words(text: str) -> int:
    return len(text.split())


def use(schema_text: str, prompt_text: str, report: MarkupFuzzReport) -> None:
    """Parse both and lay the prompt out, as far as they are right."""
    try:
        schema = parse_schema(schema_text)
        layout = lay_out(schema, words)
        report.outcomes["parsed"] += 1
        parts = resolve(schema, parse_prompt(prompt_text))
        check_lengths(parts, words)
        extents = layout.place(parts, words)
        assert len(extents) == len(parts)
        report.outcomes["resolved"] += 1
    except SchemaError as refused:
        report.outcomes["refused" if str(refused).startswith("<string>:") else "without place"] += 1


def fuzz(texts: int, seed: int) -> MarkupFuzzReport:
    """Change a schema or a prompt ``texts`` times."""
    draw, report = random.Random(seed), MarkupFuzzReport()

    def too_slow(signum: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, too_slow)
    try:
        for number in range(texts):
            k = draw.randrange(len(SCHEMAS))
            schema, prompt = SCHEMAS[k], PROMPTS[k]
            if number % 2:
                schema = changed(schema, draw)
            else:
                prompt = changed(prompt, draw)
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
            try:
                use(schema, prompt, report)
            except (Exception, TooSlow):
                report.failures.append(f"{schema!r}\n{prompt!r}\n{traceback.format_exc()}")
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report = fuzz(given.texts, given.seed)
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    sys.stdout.write(f"{given.texts:,} texts: {counts}, {len(report.failures)} failures\n")
    sys.stdout.write("\n".join(report.failures[:5]))
    return min(len(report.failures), 1)


if __name__ == "__main__":
    sys.exit(main())
