"""Whatever a user gets wrong is said before anything is measured, with exit status 2."""

from __future__ import annotations

import pytest

from cli.commands import invoke, said


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("ttft", "--rounds", "0"), ("ttft", "--chunks", "0"), ("ttft", "--chunk-tokens", "0"),
     ("ttft", "--question-tokens", "-1"), ("ttft", "--ratio", "1.5"), ("sweep", "--rounds", "0"),
     ("trace", "--rounds", "0"), ("trace", "--ratio", "-0.1"), ("load", "--requests", "0"),
     ("load", "--skew", "-1"), ("load", "--skew", "nan"), ("auto", "--min-ratio", "nan"),
     ("load", "--warm-requests", "-1"), ("auto", "--min-ratio", "1.1"),
     ("ingest", "--chunks", "0"), ("ingest", "--chunk-tokens", "-1"),
     ("ingest", "--reingest-chunks", "-1"), ("ingest", "--reingest-chunk-tokens", "5000")],
)  # fmt: skip
def test_a_number_out_of_range_names_its_option(command: str, option: str, value: str) -> None:
    result = invoke("bench", command, "--geometry", "tiny", option, value, "--json")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: Invalid value for '{option}'")
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["ttft", "sweep", "trace", "load", "auto", "ingest"])
@pytest.mark.parametrize("dtype", ["foo", "int8", "nn"])
def test_a_dtype_that_no_kv_has_is_refused_as_for_a_model(command: str, dtype: str) -> None:
    result = invoke("bench", command, "--geometry", "tiny", "--dtype", dtype, "--json")
    assert result.exit_code == 2
    expected = f"error: dtype '{dtype}' is not one of auto, float32, float16, bfloat16"
    assert said(result) == expected
    with_model = invoke("bench", command, "--model", "demo", "--dtype", dtype, "--json")
    assert said(with_model) == expected


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [((), "give either --geometry or --model"),
     (("--geometry", "huge"), "geometry 'huge' is not one of"),
     (("--geometry", "tiny", "--chunks", "5000"), "passes the context of 32768"),
     (("--geometry", "tiny", "--policy", "magic"), "magic"),
     (("--geometry", "tiny", "--device", "abacus"), "device 'abacus'")],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_sentence(wrong: tuple[str, ...], sentence: str) -> None:
    result = invoke("bench", "ttft", "--chunk-tokens", "16", *wrong)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["ttft", "sweep", "throughput", "trace", "load"])
def test_a_tier_that_nobody_could_wait_for_is_refused_before_anything_is_loaded(
    command: str,
) -> None:
    result = invoke("bench", command, "--geometry", "none such", "--tier", "1e-300B/s")
    assert result.exit_code == 2
    assert said(result).startswith("error: tier '1e-300B/s' is slower than any disk")


@pytest.mark.parametrize("ratios", ["", "0.1,much", "1.5", "nan"])
def test_ratios_outside_0_to_1_are_refused(ratios: str) -> None:
    result = invoke("bench", "sweep", "--geometry", "tiny", "--ratios", ratios)
    assert result.exit_code == 2
    assert "ratio" in said(result)
