"""The cheapest device that adds no latency, its cost, and lists of devices that make no sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError
from blendrag.planning.storage import Device, choose_storage, read_devices
from planning.invented import LAYER_BYTES, evenly, profile, prompt

NVME, SATA, DISK = Device("nvme", 1e9, 0.10), Device("sata", 2e5, 0.05), Device("disk", 1e3, 0.01)


def chosen(*devices: Device, ratio: float = 0.15, **flags: bool):  # type: ignore[no-untyped-def]
    made = profile()
    return choose_storage(
        made, prompt(**flags), lambda candidates: evenly(ratio, candidates), devices, 2e12
    )


def test_the_cheapest_device_that_hides_is_chosen() -> None:
    """At .15 a layer computes 65 ms; a layer of three chunks loads in 15 ms from sata, 3 s from disk."""
    found = chosen(NVME, SATA, DISK)
    assert found.best is not None
    assert found.best.device is SATA
    assert [each.hides for each in found.rated] == [True, True, False]
    assert found.rated[2].waiting_s > 10
    assert found.fastest.device is NVME


def test_the_cost_is_that_of_the_corpus_for_a_month() -> None:
    assert [each.cost_per_month for each in chosen(NVME, SATA, DISK).rated] == [200, 100, 20]


def test_a_higher_ratio_hides_a_slower_device() -> None:
    slow = Device("slow", 2e4, 0.01)  # 150 ms a layer
    assert chosen(NVME, slow, ratio=0.15).best.device is NVME  # 65 ms of compute
    assert chosen(NVME, slow, ratio=0.6).best.device is slow  # 200 ms


def test_where_every_device_adds_latency_none_is_the_best_and_the_fastest_is_named() -> None:
    found = chosen(DISK, Device("tape", 10, 0.001))
    assert found.best is None
    assert found.fastest.device is DISK


@pytest.mark.parametrize(
    ("layers", "policy"),
    [
        (1, {"scouted_layers": 1}),
        (2, {"scouted_layers": 2}),
        (2, {"needs_deviation": True}),
        (2, {}),
    ],
)
def test_a_model_of_few_layers_does_not_load_from_tape_as_if_nothing_could_hide_it(
    layers: int, policy: dict[str, int]
) -> None:
    """All that is loaded is the first layer's, or that of the first one loaded."""
    made = profile(layer_bytes=(LAYER_BYTES,) * layers)
    asked = prompt(**policy)
    parts = tuple(replace(part, layer_bytes=made.layer_bytes) for part in asked.parts)
    found = choose_storage(
        made,
        replace(asked, parts=parts),
        lambda candidates: [0.15 * candidates] * (layers - 1),
        (NVME, Device("tape", 10, 0.001)),
        2e12,
    )
    assert [each.hides for each in found.rated] == [True, False]
    assert found.best is not None
    assert found.best.device is NVME


def test_no_devices_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        chosen()


# -- lists -------------------------------------------------------------------------------------------


def write(folder: Path, text: str, name: str = "devices.json") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    as_json = '[{"name": "a", "throughput": "4.8 GB/s", "price_per_gb_month": 0.1}]'
    as_toml = '[[devices]]\nname = "a"\nthroughput = 4800000000\nprice_per_gb_month = 0.1\n'
    expected = (Device("a", 4.8e9, 0.1),)
    assert read_devices(write(tmp_path, as_json)) == expected
    assert read_devices(write(tmp_path, as_toml, "devices.toml")) == expected
    assert read_devices(write(tmp_path, '{"devices": ' + as_json + "}")) == expected


@pytest.mark.parametrize("speed", ["500 MB/s", "500MB/s", "5e8 B/s", 5e8, 500000000])
def test_throughputs_are_numbers_or_texts_with_a_unit(tmp_path: Path, speed: object) -> None:
    import json

    entry = {"name": "a", "throughput": speed, "price_per_gb_month": 0}
    assert read_devices(write(tmp_path, json.dumps([entry])))[0].bytes_per_s == 5e8


GOOD = '"name": "a", "throughput": 1, "price_per_gb_month": 1'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no JSON"),
        ("[", "is no JSON"),
        ("[]", "holds no devices"),
        ("3", "holds no devices"),
        ('{"disks": []}', "holds no devices"),
        ("[3]", "device 1 of"),
        ("[{}]", "expected name"),
        (f"[{{{GOOD}, \"colour\": 1}}]", "and no more"),
        (f"[{{{GOOD}}}, {{{GOOD}}}]", "names 'a' twice"),
        ('[{"name": "", "throughput": 1, "price_per_gb_month": 1}]', "expected a text"),
        ('[{"name": "a", "throughput": 0, "price_per_gb_month": 1}]', "above 0"),
        ('[{"name": "a", "throughput": -5, "price_per_gb_month": 1}]', "above 0"),
        ('[{"name": "a", "throughput": true, "price_per_gb_month": 1}]', "above 0"),
        ('[{"name": "a", "throughput": Infinity, "price_per_gb_month": 1}]', "above 0"),
        ('[{"name": "a", "throughput": "fast", "price_per_gb_month": 1}]', "500 MB/s"),
        ('[{"name": "a", "throughput": "5 MB", "price_per_gb_month": 1}]', "500 MB/s"),
        ('[{"name": "a", "throughput": 1, "price_per_gb_month": -1}]', "0 or more"),
        ('[{"name": "a", "throughput": 1, "price_per_gb_month": "cheap"}]', "0 or more"),
        ('[{"name": "a", "throughput": 1, "price_per_gb_month": NaN}]', "0 or more"),
        (f'[{{"name": "a", "throughput": {"9" * 400}, "price_per_gb_month": 1}}]', "above 0"),
        (f'[{{"name": "a", "throughput": 1, "price_per_gb_month": -{"9" * 400}}}]', "0 or more"),
        ('[{"name": "a\\nb", "throughput": 1, "price_per_gb_month": 1}]', "on one line"),
    ],
)  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_devices(write(tmp_path, text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InvalidInputError, match="cannot be read"):
            read_devices(path)
