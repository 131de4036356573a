"""The trap of :mod:`unpickling`: no test can unpickle anything unnoticed."""

import _pickle
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import unpickling
from unpickling import Unpickled

TESTS = Path(unpickling.__file__).parent
pytest_plugins = ["pytester"]


class Innocent:
    """A pickle of it names a class, which is enough for the trap."""


def with_a_subclass(data):
    class Restricted(_pickle.Unpickler):
        def find_class(self, module, name):
            return super().find_class(module, name)

    return Restricted(io.BytesIO(data)).load()


WAYS_IN = {
    "load": lambda data: pickle.load(io.BytesIO(data)),
    "loads": pickle.loads,
    "Unpickler": lambda data: pickle.Unpickler(io.BytesIO(data)).load(),
    "loads bound before the trap": _pickle.loads,
    "Unpickler bound before the trap": lambda data: _pickle.Unpickler(io.BytesIO(data)).load(),
    "the Python implementation": lambda data: pickle._Unpickler(io.BytesIO(data)).load(),
    "a subclass": with_a_subclass,
}


@pytest.fixture
def emptied():
    """A test here may spring the trap without failing."""
    yield
    unpickling.caught()


@pytest.mark.parametrize("way", WAYS_IN)
def test_no_way_into_unpickling_is_open(way, emptied):
    with pytest.raises(Unpickled):
        WAYS_IN[way](pickle.dumps(Innocent()))
    assert len(unpickling.caught()) == 1


def test_torch_loads_weights_and_numpy_no_objects(tmp_path, emptied):
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    assert torch.equal(torch.load(tmp_path / "weights.pt")["weight"], torch.ones(3))
    assert unpickling.caught() == []
    with pytest.raises(Unpickled, match="weights_only"):
        torch.load(tmp_path / "weights.pt", weights_only=False)
    np.save(tmp_path / "objects.npy", np.array([Innocent()], dtype=object), allow_pickle=True)
    with pytest.raises(Unpickled):
        np.load(tmp_path / "objects.npy", allow_pickle=True)


def test_only_what_a_test_may_unpickle_by_name_is_unpickled():
    with unpickling.allowed():
        assert isinstance(pickle.loads(pickle.dumps(Innocent())), Innocent)
    with pytest.raises(Unpickled):
        pickle.loads(pickle.dumps(1))
    assert unpickling.caught() == ["pickle.loads"]


@pytest.mark.slow
def test_a_test_that_swallows_what_the_trap_raised_fails(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import contextlib
        import pickle

        def test_swallows():
            with contextlib.suppress(Exception):
                pickle.loads(pickle.dumps(1))

        def test_a_rendered_prompt_survives_pickling():
            assert pickle.loads(pickle.dumps(1)) == 1
        """
    )
    pytester.makeconftest((TESTS.parent / "conftest.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes a second
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*unpickled in this test: pickle.loads*"])
