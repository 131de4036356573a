"""A few of the files of ``make fuzz-files``."""

from __future__ import annotations

import math
from pathlib import Path

from lab.soak import files_fuzz


def test_changed_files_are_read_or_refused_with_one_sentence(tmp_path: Path) -> None:
    report = files_fuzz.fuzz(90, 3, tmp_path, limit_s=math.inf)
    assert report.failures == []
    assert {outcome.split()[0] for outcome in report.outcomes} == {
        Path(name).suffix for name in files_fuzz.GOOD
    }
    assert not [*tmp_path.iterdir()]
