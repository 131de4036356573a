"""Errors can be pickled and renamed."""

from __future__ import annotations

import copy
import pickle

from blendrag import errors

MADE: list[errors.BlendragError] = [
    errors.InvalidInputError("a is 1, expected 2; write 2"),
    errors.InvalidOptionError("stop", "holds an empty text; leave it out"),
    errors.ContextOverflowError(100, 20, 64),
    errors.SchemaError("travel.xml:3", "<modul> is unknown, expected <module>"),
    errors.UnreadableDocumentError("a.txt", "holds no text"),
    errors.StoreFullError("no room", needed_bytes=7),
    errors.RequestTimeout(0.5),
    errors.CorpusError("there is none"),
]


def test_an_error_that_was_pickled_is_the_same():
    """A process pool hangs on an error that cannot be unpickled."""
    for error in MADE:
        error.add_note("prompt 2 of 3")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert vars(again) == vars(error)
            assert again.__notes__ == ["prompt 2 of 3"]


def test_an_option_error_can_be_renamed():
    renamed = errors.InvalidOptionError("timeout_s", "0 is not more than 0").called("timeout")
    assert (renamed.name, str(renamed)) == ("timeout", "timeout 0 is not more than 0")
