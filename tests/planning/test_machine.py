"""What the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.planning import machine


@pytest.mark.parametrize("version", [0, 1])
def test_the_memory_limit_of_a_container_counts(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = machine.CONTROL_GROUPS[version]._replace(root=tmp_path / "groups")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", [names])
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"7:{names.controller}:/pod/app\n3:cpu,cpuacct:/\n")
    alone = machine.available_bytes()
    own = names.root / "pod" / "app"
    own.mkdir(parents=True)
    (own / names.limit).write_text("max\n")
    pod = names.root / "pod"
    (pod / names.limit).write_text("5000\n")
    (pod / names.used).write_text("4000\n")
    (pod / "memory.stat").write_text(f"anon 3500\n{names.droppable} 250\n")
    assert machine.available_bytes() == 1250 < alone
