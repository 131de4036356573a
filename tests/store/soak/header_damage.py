"""Ways to damage or forge a payload's header: its length, its JSON, the numbers and names in that."""

from __future__ import annotations

import json
import struct
from typing import Any

from blendrag.store.format import ALIGNMENT_BYTES as PAGE
from soak.payload_target import Target

#: What headers are given in place of their numbers and names.
_HOSTILE: list[Any] = [
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


def length(target: Target) -> None:
    lengths = [0, 1, 7, PAGE - 9, PAGE - 7, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, (1 << 64) - 1]
    target.write(struct.pack("<Q", target.chance.choice(lengths)) + target.data[8:])


def _with_header(target: Target, header: bytes) -> None:
    """This header, padded or not, its length right or not."""
    if target.chance.random() < 0.7 and len(header) < PAGE - 8:
        header = header.ljust(PAGE - 8)
    length = len(header) if target.chance.random() < 0.9 else target.chance.randrange(1 << 40)
    target.write(struct.pack("<Q", length) + header + target.data[PAGE:])


def edit_header(target: Target) -> None:
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
        place[name] = target.chance.choice(_HOSTILE)
    elif action == 1:
        del place[name]
    else:
        place[f"{name}x"] = target.chance.choice(_HOSTILE)
    _with_header(target, json.dumps(fields, separators=(",", ":")).encode())


def duplicate_names(target: Target) -> None:
    text = target.data[8:PAGE].rstrip()
    name = target.chance.choice([b"__metadata__", b"l0000", b"l0002"])
    _with_header(target, text[:-1] + b',"' + name + b'":{}}')


def deep_json(target: Target) -> None:
    depth = target.chance.choice([100, 1000, 100_000])
    opening = target.chance.choice([b"[", b'{"a":'])
    _with_header(target, opening * depth)


def no_json(target: Target) -> None:
    _with_header(
        target,
        target.chance.choice([b"", b"null", b"[]", b'"', b"\xff\xfe" * 99, b"{", b"1e999", b"NaN"]),
    )
