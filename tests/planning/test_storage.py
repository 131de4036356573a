"""The cheapest storage device that adds no latency."""

from __future__ import annotations

import pytest

from blendrag.planning.storage import Device, StorageChoice, choose_storage
from planning.invented import LAYER_BYTES, profile

NVME, SATA, DISK = Device("nvme", 1e9, 0.10), Device("sata", 2e5, 0.05), Device("disk", 1e3, 0.01)
TAPE = Device("tape", 10, 0.001)


def chosen(*devices: Device, ratio: float = 0.15, policy: str = "random") -> StorageChoice:
    return choose_storage(profile(), policy, ratio, 3, 2e12, devices)


def test_the_cheapest_device_that_hides_is_chosen():
    """At .15 a layer computes 77 ms; a layer of three chunks loads in 15 ms from sata, 3 s from disk."""
    found = chosen(NVME, SATA, DISK)
    assert found.best is not None
    assert found.best.device is SATA
    assert [each.hides for each in found.rated] == [True, True, False]
    assert [each.cost_per_month for each in found.rated] == [200, 100, 20]
    assert found.rated[2].waiting_s > 10
    assert found.fastest.device is NVME


def test_a_higher_ratio_hides_a_slower_device():
    slow = Device("slow", 2e4, 0.01)  # 150 ms a layer
    for ratio, device in ((0.15, NVME), (0.6, slow)):  # 77 and 212 ms of compute
        best = chosen(NVME, slow, ratio=ratio).best
        assert best is not None
        assert best.device is device


def test_no_device_is_best_if_each_adds_latency_and_the_fastest_is_named():
    found = chosen(DISK, TAPE)
    assert found.best is None
    assert found.fastest.device is DISK


@pytest.mark.parametrize(
    ("layers", "policy"), [(1, "query"), (1, "blend"), (2, "random"), (2, "hkvd"), (2, "blend")]
)
def test_the_first_load_of_a_model_of_few_layers_counts(layers, policy):
    made = profile(layer_bytes=(LAYER_BYTES,) * layers)
    found = choose_storage(made, policy, 0.15, 3, 2e12, (NVME, TAPE))
    assert [each.hides for each in found.rated] == [True, False]
