"""Polynomial hashes over code points, of all parts of a text at once.

Modulo 2⁶⁴, the same in every process and release, since they are persisted: 63 bits, to fit a signed
column. Not made to withstand someone who looks for collisions; whoever finds one is told by the text.
"""

from __future__ import annotations

import numpy as np

U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2⁶⁴
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = U64(0xFF51AFD7ED558CCD)


class PrefixSums:
    """Hashes of any part of a text in constant time."""

    def __init__(self, text: str) -> None:
        codes = _codes(text)
        self.size = len(codes)
        with np.errstate(over="ignore"):
            self._inverses = _POWERS_OF_INVERSE.upto(self.size + 1)
            self._sums = np.zeros(self.size + 1, U64)
            np.cumsum(codes * _POWERS.upto(self.size), out=self._sums[1:])

    def windows(self, width: int) -> np.ndarray:
        """Hashes of ``text[i : i + width]`` for every i.  [size - width + 1]"""
        if self.size < width:
            return np.zeros(0, U64)
        with np.errstate(over="ignore"):
            raw = self._sums[width:] - self._sums[:-width]
            raw *= self._inverses[: self.size - width + 1]
            return _mixed(raw)

    def hashes(self, starts: np.ndarray, lengths: np.ndarray | int) -> np.ndarray:
        """Hashes of ``text[start : start + length]`` for each pair; all must fit."""
        with np.errstate(over="ignore"):
            raw = self._sums[starts + lengths] - self._sums[starts]
            raw *= self._inverses[starts]
            return _mixed(raw)


class Filter:
    """Which of many hashes are surely not among a few: tells most apart by one look, the rest by two."""

    def __init__(self, hashes: np.ndarray) -> None:
        bits = max(16, min(24, (16 * max(1, len(hashes))).bit_length()))
        self._mask = U64((1 << bits) - 1)
        self._tables = tuple(np.zeros(1 << bits, np.bool_) for _ in _SHIFTS)
        for table, shift in zip(self._tables, _SHIFTS, strict=True):
            table[(hashes >> shift) & self._mask] = True

    def maybe(self, hashes: np.ndarray) -> np.ndarray:
        """Places of those that may be among them, ascending."""
        first, second = self._tables
        places = np.flatnonzero(self._look(first, hashes))
        return places[self._look(second, hashes[places] >> _SHIFTS[1])]

    def _look(self, table: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        # clip: no bounds to check, which takes half of the time (numpy 2.4); an index's sign bit is 0
        return table.take((hashes & self._mask).view(np.int64), mode="clip")


#: Which bits of a hash each table looks at.
_SHIFTS = (U64(0), U64(32))


class _Powers:
    """1, base, base², …, computed once and then longer as needed. Safe to share between threads."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._known = np.ones(1, U64)

    def upto(self, size: int) -> np.ndarray:
        """[size]"""
        known = self._known
        if len(known) < size:
            steps = np.full(max(size, 2 * len(known)), self._base, U64)
            steps[0] = 1
            known = self._known = np.cumprod(steps, dtype=U64)
        return known[:size]


_POWERS = _Powers(_BASE)
_POWERS_OF_INVERSE = _Powers(_INVERSE)


def _codes(text: str) -> np.ndarray:
    """Code points, plus one so that leading NULs count.  [N] uint64"""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(U64) + U64(1)


def _mixed(raw: np.ndarray) -> np.ndarray:
    """Spreads the polynomials' values over all bits and drops one, in place."""
    raw ^= raw >> U64(33)
    raw *= _MIX
    raw ^= raw >> U64(33)
    raw >>= U64(1)
    return raw
