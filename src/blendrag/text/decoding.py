"""Bytes of a file → text: which encoding, and what is damaged.

UTF-8 with a few bad bytes stays UTF-8: they are read as U+FFFD, and a sentence says so. Other encodings are
declared by the file (HTML, XML, Python) or guessed by charset-normalizer. All of it takes linear time.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

#: Enough to tell whether a file is text.
BEGINNING_BYTES = 64 * 1024

#: The codecs that follow a byte order mark. UTF-32 comes first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: Encodings that are guessed: with NUL bytes, and without.
_WIDE = ["utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"]
_NARROW = [
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "iso8859_2", "koi8_r",
    "cp932", "euc_jp", "gb18030", "big5", "cp949",
]  # fmt: skip
#: What browsers read for declared names, besides :data:`_NARROW`. Windows calls several by narrower names.
_DECLARED = {
    "iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "euc_kr": "cp949", "big5hkscs": "big5hkscs", "koi8-u": "koi8-u", "tis-620": "cp874",
    "cp874": "cp874", "cp1258": "cp1258", "cp437": "cp437", "cp850": "cp850", "cp866": "cp866",
    "mac-roman": "mac-roman", "iso2022_jp": "iso2022_jp",
    **{f"iso8859-{n}": f"iso8859-{n}" for n in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)},
    **{codecs.lookup(name).name: name for name in _NARROW},
}  # fmt: skip
#: Japanese in seven bits, which is ASCII to every other check.
_ISO_2022_JP = re.compile(rb"\x1b\$[@B]")
#: An encoding that Python source declares (PEP 263).
_PYTHON = re.compile(rb"^(?:[^\n]*\n)?[ \t\f]*#[^\n]*?coding[:=][ \t]*([-\w.]+)")
#: Characters of two bytes in UTF-8 that other encodings make of a letter and a sign.
_WEAK = re.compile("[\u0100-\u07ff]+")
#: No text has more than a few of these: control characters but those of terminals, private use, U+FFFD.
_ODD = re.compile("[\0-\x06\x0e-\x19\x1c-\x1f\x7f\ue000-\uf8ff\ufffd]+")
_HIGH = bytes(range(128, 256))
_NOT_WINDOWS = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")


class Decoded(NamedTuple):
    text: str
    damage: str
    """What could not be decoded, as a sentence without subject; empty if everything could."""


def decoded(data: bytes) -> Decoded | None:
    """The text of a whole file; ``None`` if it is binary."""
    encoding = _encoding_of(data, is_whole=True)
    if encoding is None:
        return None
    try:
        text, first = data.decode(encoding), len(data)
    except UnicodeDecodeError as exc:
        text, first = data.decode(encoding, "replace"), exc.start
    wide = encoding.startswith(("utf_16", "utf_32", "utf-16", "utf-32"))
    if not wide and (nul := data.find(b"\0")) >= 0:
        text, first = re.sub("\0+", "\ufffd", text), min(first, nul)
    if first == len(data):
        return Decoded(text, "")
    bad = max(1, text.count("\ufffd") - data.count("\ufffd".encode()))
    places = (
        f"1 place, byte {first:,}" if bad == 1 else f"{bad:,} places, the first at byte {first:,}"
    )
    name = encoding.upper().replace("_", "-").removesuffix("-SIG")
    line = data.count(b"\n", 0, first) + 1
    return Decoded(
        text,
        f"is not {name} at {places} (line {line:,}), read as U+FFFD; save it again as UTF-8",
    )


def is_text(beginning: bytes) -> bool:
    """Whether a file with this beginning, of :data:`BEGINNING_BYTES` if it is longer, is text."""
    return _encoding_of(beginning, is_whole=len(beginning) < BEGINNING_BYTES) is not None


def _encoding_of(data: bytes, is_whole: bool) -> str | None:
    for mark, marked in _MARKS:
        if data.startswith(mark):
            beginning = data[:BEGINNING_BYTES].decode(marked, "replace")
            return marked if _is_plausible(beginning) else None
    nuls = data.count(b"\0")
    # a few NUL bytes in a log are damage
    if nuls > len(data) / 100 and (nuls > 1 or len(data) < 32):
        return None if _is_binary(data) else _guessed(data, _WIDE)
    encoding = _narrow(data.replace(b"\0", b"") if nuls else data, is_whole)
    if encoding is None and nuls and not _is_binary(data):
        return _guessed(data, _WIDE)  # Chinese in UTF-16 has few NUL bytes
    return encoding


def _narrow(data: bytes, is_whole: bool) -> str | None:
    """The encoding of a text without NUL bytes."""
    if declared := _declared(data):
        return declared
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, is_whole)
    bad = text.count("\ufffd") - data.count("\ufffd".encode())
    if not bad:
        return "utf-8"
    good = len(text) - len(data.translate(None, _HIGH)) - bad
    strong = good - (len(text) - len(_WEAK.sub("", text)))
    if (strong >= bad or good >= 2 * bad) and _is_plausible(text.replace("\ufffd", "")):
        return "utf-8"
    odd = _NOT_WINDOWS.findall(data)
    if odd and not good and bad <= len(text) / 1000:
        return "utf-8"
    if len(odd) <= bad / 50:  # damage in Windows-1252, not lead bytes of Shift JIS
        data = _NOT_WINDOWS.sub(b"", data)
    if not _is_plausible(data.decode("latin-1")):
        return None
    for cut in range(1 if is_whole else 4):  # a beginning may end inside a character
        guess = _guessed(data[: len(data) - cut], _NARROW)
        if guess is not None:
            return guess
    return "utf-8" if _is_plausible(text) else None


def _declared(data: bytes) -> str | None:
    """The declared encoding, if the text is in it. One that is also UTF-8 is taken for UTF-8."""
    beginning = data[:BEGINNING_BYTES]
    if _ISO_2022_JP.search(beginning):
        return "iso2022_jp" if _decodes(beginning, "iso2022_jp") else None
    if beginning.isascii() and len(beginning) == len(data):
        return None
    name: str | None = None
    if beginning.lstrip().startswith(b"<"):
        from bs4.dammit import EncodingDetector

        name = EncodingDetector.find_declared_encoding(beginning, is_html=True)
    elif found := _PYTHON.match(beginning):
        name = found[1].decode("ascii", "ignore")
    try:
        encoding = _DECLARED.get(codecs.lookup(name).name) if name else None
    except (LookupError, ValueError):
        return None
    return (
        encoding if encoding and not _decodes(data, "utf-8") and _decodes(data, encoding) else None
    )


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _is_plausible(text: str) -> bool:
    odd = len(text) - len(_ODD.sub("", text))
    return odd <= max(2, len(text) / 20)


def _is_binary(data: bytes) -> bool:
    from charset_normalizer import is_binary

    return is_binary(data[:BEGINNING_BYTES])


def _guessed(data: bytes, encodings: list[str]) -> str | None:
    """Windows-1252 wins a tie: short texts fit several encodings."""
    from charset_normalizer import from_bytes

    found = from_bytes(data, cp_isolation=encodings)
    if not found:  # its default allows little that is unusual
        found = from_bytes(data, cp_isolation=encodings, threshold=0.5)
    best = found.best()
    if best is None:
        return None
    worth = (best.chaos, -best.coherence)
    alike = [match for match in found if (match.chaos, -match.coherence) <= worth]
    is_western = any("cp1252" in match.could_be_from_charset for match in alike)
    return "cp1252" if is_western else best.encoding
