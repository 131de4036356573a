"""A few of the requests that ``make fuzz-server`` sends."""

from __future__ import annotations

from pathlib import Path

from lab.soak.fields_fuzz import fuzz, fuzzed_server, routes


def test_hostile_fields_get_a_status_below_500_and_one_sentence(tmp_path: Path) -> None:
    with fuzzed_server(tmp_path) as server:
        paths = {path for _, path, body in routes(server) if body is not None}
        assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/ingest"}
        report = fuzz(server, requests=150, seed=3)
    assert not report.failures, "\n".join(report.failures[:3])
    assert {"200", "400", "404"} <= report.statuses.keys()
