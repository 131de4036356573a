"""A few of the changed texts of ``make fuzz-schema``."""

from __future__ import annotations

from lab.soak.markup_fuzz import PROMPTS, SCHEMAS, MarkupFuzzReport, fuzz, use


def test_changed_markup_is_parsed_or_refused():
    report = fuzz(2_000, seed=1)
    assert not report.failures, report.failures[0]
    assert set(report.outcomes) == {"parsed", "resolved", "refused"}
    assert min(report.outcomes.values()) > 100


def test_unchanged_markup_is_accepted():
    report = MarkupFuzzReport()
    for schema, prompt in zip(SCHEMAS, PROMPTS, strict=True):
        use(schema, prompt, report)
    assert report.outcomes == {"parsed": 2, "resolved": 2}
