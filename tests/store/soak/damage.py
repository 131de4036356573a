"""Ways to damage a payload file behind the store's back, by chance or by malice.

What is *not* here: bytes forged together with the checksums that fit them. Checksums find damage;
they are no signature.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.store.format import ALIGNMENT_BYTES as PAGE


@dataclass(frozen=True)
class Target:
    """The file to be damaged, and what else there is to do it with."""

    path: Path
    data: bytes
    """What is in it, and right."""
    others: list[bytes]
    """Payloads of other chunks, of another namespace, of another length."""
    outside: Path
    """A file beside the store that nobody may touch."""
    chance: random.Random

    def write(self, data: bytes | bytearray) -> None:
        self.path.write_bytes(data)

    def somewhere(self, size: int = 1) -> int:
        return self.chance.randrange(max(1, len(self.data) - size))


Damage = Callable[[Target], object]

#: What headers are given in place of their numbers and names.
HOSTILE: list[Any] = [
    2**63,
    2**64 - 1,
    2**31,
    -1,
    0,
    1,
    1e308,
    None,
    True,
    "",
    "0",
    "9" * 5000,
    "../../../outside",
    "F64",
    [],
    {},
    [2, 2, 24, 8],
    [0, 2**63],
    "\ud800",
]


def _flip(target: Target, begin: int, end: int, count: int) -> None:
    data = bytearray(target.data)
    for _ in range(count):
        data[target.chance.randrange(begin, end)] ^= 1 << target.chance.randrange(8)
    target.write(data)


def _flip_anywhere(target: Target) -> None:
    _flip(target, 0, len(target.data), target.chance.choice([1, 1, 1, 2, 8]))


def _flip_in_header(target: Target) -> None:
    _flip(target, 0, PAGE, target.chance.choice([1, 1, 2]))


def _flip_in_length(target: Target) -> None:
    _flip(target, 0, 8, 1)


def _overwrite(target: Target) -> None:
    size = target.chance.choice([1, 16, 64, PAGE])
    at = target.somewhere(size)
    data = bytearray(target.data)
    data[at : at + size] = target.chance.choice([bytes(size), target.chance.randbytes(size)])
    target.write(data)


def _truncate(target: Target) -> None:
    size = target.chance.choice([0, 7, 8, PAGE - 1, PAGE, target.somewhere(), len(target.data) - 1])
    os.truncate(target.path, size)


def _extend(target: Target) -> None:
    more = target.chance.choice([1, 8, PAGE, target.chance.randrange(1, 3 * PAGE)])
    target.write(target.data + target.chance.choice([bytes(more), target.chance.randbytes(more)]))


def _insert(target: Target) -> None:
    at = target.somewhere()
    more = target.chance.randbytes(target.chance.randint(1, 64))
    target.write(target.data[:at] + more + target.data[at:])


def _remove_bytes(target: Target) -> None:
    at = target.somewhere()
    target.write(target.data[:at] + target.data[at + target.chance.randint(1, 64) :])


def _swap_pages(target: Target) -> None:
    pages = [target.data[at : at + PAGE] for at in range(0, len(target.data), PAGE)]
    i, j = (target.chance.randrange(len(pages)) for _ in range(2))
    pages[i], pages[j] = pages[j], pages[i]
    target.write(b"".join(pages))


def _of_another(target: Target) -> None:
    target.write(target.chance.choice(target.others))


def _header_of_another(target: Target) -> None:
    target.write(target.chance.choice(target.others)[:PAGE] + target.data[PAGE:])


def _data_of_another(target: Target) -> None:
    target.write(target.data[:PAGE] + target.chance.choice(target.others)[PAGE:])


def _layer_of_another(target: Target) -> None:
    begin = target.chance.randrange(PAGE, len(target.data), 512)
    end = min(begin + 512 * target.chance.randint(1, 8), len(target.data))
    target.write(
        target.data[:begin] + target.chance.choice(target.others)[begin:end] + target.data[end:]
    )


def _length(target: Target) -> None:
    lengths = [0, 1, 7, PAGE - 9, PAGE - 7, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, (1 << 64) - 1]
    target.write(struct.pack("<Q", target.chance.choice(lengths)) + target.data[8:])


def _with_header(target: Target, header: bytes) -> None:
    """This header, padded or not, its length right or not."""
    if target.chance.random() < 0.7 and len(header) < PAGE - 8:
        header = header.ljust(PAGE - 8)
    length = len(header) if target.chance.random() < 0.9 else target.chance.randrange(1 << 40)
    target.write(struct.pack("<Q", length) + header + target.data[PAGE:])


def _edit_header(target: Target) -> None:
    fields = json.loads(target.data[8:PAGE])
    place = fields
    while True:
        name = target.chance.choice(list(place))
        if isinstance(place[name], dict) and target.chance.random() < 0.8:
            place = place[name]
            continue
        break
    action = target.chance.randrange(3)
    if action == 0:
        place[name] = target.chance.choice(HOSTILE)
    elif action == 1:
        del place[name]
    else:
        place[f"{name}x"] = target.chance.choice(HOSTILE)
    _with_header(target, json.dumps(fields, separators=(",", ":")).encode())


def _duplicate_names(target: Target) -> None:
    text = target.data[8:PAGE].rstrip()
    name = target.chance.choice([b"__metadata__", b"l0000", b"l0002"])
    _with_header(target, text[:-1] + b',"' + name + b'":{}}')


def _deep_json(target: Target) -> None:
    depth = target.chance.choice([100, 1000, 100_000])
    opening = target.chance.choice([b"[", b'{"a":'])
    _with_header(target, opening * depth)


def _no_json(target: Target) -> None:
    _with_header(
        target,
        target.chance.choice([b"", b"null", b"[]", b'"', b"\xff\xfe" * 99, b"{", b"1e999", b"NaN"]),
    )


def _vanish(target: Target) -> None:
    target.path.unlink()


def _link(target: Target) -> None:
    target.path.unlink()
    target.path.symlink_to(target.chance.choice([target.outside, target.path.parent, "nowhere"]))


def _linked_copy(target: Target) -> None:
    """The right bytes, but elsewhere: not followed all the same."""
    elsewhere = target.outside.with_name("elsewhere")
    elsewhere.write_bytes(target.data)
    target.path.unlink()
    target.path.symlink_to(elsewhere)


def _fifo(target: Target) -> None:
    target.path.unlink()
    os.mkfifo(target.path)


def _directory(target: Target) -> None:
    target.path.unlink()
    target.path.mkdir()
    if target.chance.random() < 0.5:
        (target.path / "inside").write_bytes(b"mine")


PAYLOAD: dict[str, Damage] = {
    function.__name__.strip("_"): function
    for function in (
        _flip_anywhere,
        _flip_in_header,
        _flip_in_length,
        _overwrite,
        _truncate,
        _extend,
        _insert,
        _remove_bytes,
        _swap_pages,
        _of_another,
        _header_of_another,
        _data_of_another,
        _layer_of_another,
        _length,
        _edit_header,
        _duplicate_names,
        _deep_json,
        _no_json,
        _vanish,
        _link,
        _linked_copy,
        _fifo,
        _directory,
    )
}


def put_right(path: Path, data: bytes) -> None:
    """The payload as it was, whatever lies there now."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
