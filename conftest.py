"""Shared by all tests: no network, quiet libraries, one thread, nothing unpickled, helpers importable."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blendrag.config import settings

if TYPE_CHECKING:
    from blendrag.fusor import Fusor
    from blendrag.model import ModelAdapter

# torch and transformers are imported only where tests run: the process that deals them to workers starts
# at once.
gc.disable()  # until all tests are collected
ROOT = Path(__file__).resolve().parent
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
#: Where a file that is synced is not waited for, if there is room for what the tests write.
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 4 << 30
if not IS_WORKER:  # the workers and every command of the tests share these
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    os.environ["BLENDRAG_CACHE"] = tempfile.mkdtemp(prefix="blendrag-cache-", dir=root)
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@pytest.fixture(autouse=True)
def requests_begin_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long running answers go first depends on the time that prefills take; ``test_scheduler.py`` tests
    that by a clock."""
    if request.path.name != "test_scheduler.py" and "blendrag.serving.scheduler" in sys.modules:
        monkeypatch.setattr(sys.modules["blendrag.serving.scheduler"], "ANSWERS_SHARE", 0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Faster than two for models this small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _few_greedy_tokens() -> Iterator[None]:
    """The gate decodes 4 tokens of each model, not 32; ``test_gate.py`` tests one with all."""
    with pytest.MonkeyPatch.context() as patch:
        if gate := sys.modules.get("blendrag.fusor.gate"):
            patch.setattr(gate, "GREEDY_TOKENS", 4)
        yield


@pytest.fixture(autouse=True, scope="session")
def _open_streams() -> Iterator[None]:
    """uvicorn closes all logging handlers, and that of absl, which rouge_score imports, closes the standard
    error of its import if a test has replaced it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "shutdown", lambda handlers=(): None)
        yield


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    """A Llama of four layers, two KV heads for four heads."""
    import tiny

    return tiny.adapter(tiny.llama())


@pytest.fixture(scope="module")
def fusor(adapter: ModelAdapter) -> Fusor:
    from blendrag.fusor import Fusor

    made = Fusor(adapter)
    assert made.fast_attention
    return made


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of that model; tests must not change it."""
    import tiny

    directory = tmp_path_factory.mktemp("saved") / "model"
    tiny.llama().save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def checkpoint(saved_llama: Path, tmp_path: Path) -> str:
    """A directory of that model of the test's own, for loading by name."""
    return str(shutil.copytree(saved_llama, tmp_path / "model"))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of this test, in which no model has a verdict."""
    folder = tmp_path / "cache"
    changed = replace(settings(), cache=folder)
    for module in ("config", "model.measurements"):
        monkeypatch.setattr(f"blendrag.{module}.settings", lambda: changed)
    return folder


@pytest.fixture
def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """``query``'s scout pass ends before the last layer, as that of ``query(33-67)`` does."""
    monkeypatch.setattr("blendrag.fusor.selection.base.DEEP_LAYERS", 1)
    monkeypatch.setattr(
        "blendrag.fusor.selection.query.QueryPolicy.deep_attention_depth", (1 / 3, 2 / 3)
    )


#: Tests of pickling itself: a wrapper or an error can be pickled by its user.
MAY_UNPICKLE = (
    "test_a_model_is_loaded_with_the_arguments_of_from_pretrained",
    "test_a_rendered_prompt_survives_pickling",
    "test_a_wrapper_is_pickled_by_its_names_or_not_at_all",
    "test_it_survives_pickling",
    "test_spawned_workers_store_kv_and_forked_ones_are_refused",
    "test_an_error_that_was_pickled_is_the_same",
    "test_an_error_keeps_its_class_fields_and_cause_but_is_no_value_error",
)


class NothingIsUnpickled:
    """Fails every test in which something was unpickled, even if the exception was swallowed."""

    def __init__(self) -> None:
        import unpickling

        self.trap = unpickling
        self.trap.arm()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Ray pickles between its processes, also while it starts and ends."""
        uses_ray = item.get_closest_marker("ray") is not None
        with self.trap.allowed() if uses_ray else contextlib.nullcontext():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        name = getattr(item, "originalname", item.name)
        with self.trap.allowed() if name in MAY_UNPICKLE else contextlib.nullcontext():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield
        self.trap.check()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage is looked for only in what the tests make, not in the libraries that they import."""
    try:
        return (yield)
    finally:
        gc.freeze()  # without collecting, which takes half a second
        gc.set_threshold(10_000, 10, 20)  # by default, it takes a twentieth of all time
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    if IS_WORKER or not config.getoption("numprocesses", None):
        config.pluginmanager.register(NothingIsUnpickled())


def pytest_unconfigure() -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["BLENDRAG_CACHE"], ignore_errors=True)
