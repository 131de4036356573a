"""Ways to damage a payload file behind the store's back, by chance or by malice.

What is *not* here: bytes forged together with the checksums that fit them. Checksums find damage;
they are no signature.
"""

from __future__ import annotations

import os

from blendrag.store.format import ALIGNMENT_BYTES as PAGE
from soak import header_damage
from soak.payload_target import Damage, Target


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
        header_damage.length,
        header_damage.edit_header,
        header_damage.duplicate_names,
        header_damage.deep_json,
        header_damage.no_json,
        _vanish,
        _link,
        _linked_copy,
        _fifo,
        _directory,
    )
}
