"""Bytes become the text they were written as; damage is named and costs the damaged characters only."""

from __future__ import annotations

import random

import pytest

from blendrag.text.decoding import BEGINNING_BYTES, decoded, is_text

TEXTS = {
    "de": "Die Brücke über die Örtze wurde 1874 für Fußgänger gebaut. ",
    "fr": "Où est la bibliothèque ? Le garçon a mangé la crème brûlée à l'hôtel. ",
    "en": "The ferry had become “far too slow”, wrote the mayor — it cost 3 € a day. ",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах. ",
    "ja": "これは日本語の文章です。漢字とかなが混ざっています。東京は日本の首都である。",
    "zh": "这是一个中文文本，用于测试编码检测。我们需要足够长的文本。北京是中国的首都。",
}


@pytest.mark.parametrize("bad", [b"\xe9", b"\xff", b"\x80", b"\xc3", b"\0", b"\0" * 9])
@pytest.mark.parametrize("language", TEXTS)
def test_a_bad_byte_in_utf8_is_one_replaced_character_and_is_named(
    language: str, bad: bytes
) -> None:
    text = TEXTS[language] * 20
    for before in ("", text[:77] + "\n", text):
        data = before.encode() + bad + text.encode()
        found = decoded(data)
        assert found is not None
        assert found.text == before + "\ufffd" * (len(bad) if bad[0] else 1) + text
        at = len(before.encode())
        assert f"1 place, byte {at:,} (line {before.count(chr(10)) + 1})" in found.damage
        assert is_text(data)


def test_several_bad_bytes_are_counted() -> None:
    found = decoded(b"\xe9".join([TEXTS["de"].encode()] * 5))
    assert found is not None
    assert found.text.count("\ufffd") == 4
    assert "not UTF-8 at 4 places, the first at byte 65 (line 1)" in found.damage


def test_a_character_cut_at_the_end_is_replaced() -> None:
    found = decoded("Zwei kühne Brücken für".encode() + "ü".encode()[:1])
    assert found is not None
    assert found.text == "Zwei kühne Brücken für\ufffd"


def test_replacement_characters_of_a_text_are_no_damage() -> None:
    assert decoded("kühn \ufffd".encode()) == ("kühn \ufffd", "")


@pytest.mark.parametrize(
    ("language", "encoding"),
    [
        ("de", "cp1252"), ("fr", "latin-1"), ("en", "cp1252"), ("ru", "cp1251"), ("ru", "koi8_r"),
        ("ja", "cp932"), ("ja", "euc_jp"), ("ja", "iso2022_jp"), ("zh", "gb18030"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [3, 2000])
def test_other_encodings_stay_what_they_are(language: str, encoding: str, times: int) -> None:
    data = (TEXTS[language] * times).encode(encoding, "ignore")
    assert decoded(data) == (data.decode(encoding), "")
    assert is_text(data[:BEGINNING_BYTES])
    if times > 3:  # a NUL byte does not make it binary
        found = decoded(data + b"\0")
        assert found is not None
        assert found.text == data.decode(encoding) + "\ufffd"


def test_a_bad_byte_in_windows_1252_does_not_make_it_another_encoding() -> None:
    found = decoded((TEXTS["de"] * 20).encode("cp1252") + b"\x81")
    assert found is not None
    assert found.text == TEXTS["de"] * 20 + "\ufffd"
    assert "not CP1252 at 1 place" in found.damage


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-be", "utf-32-be"])
def test_byte_order_marks_are_obeyed(encoding: str) -> None:
    text = "\ufeff" * encoding.endswith("be") + "sku\tname\nP-1\tBrücke\n"
    found = decoded(text.encode(encoding))
    assert found == (text.lstrip("\ufeff"), "")
    cut = decoded(text.encode("utf-16") + b"\x01")
    assert cut is not None
    assert "UTF-16 at 1 place" in cut.damage


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ('<meta charset="iso-8859-1">', "cp1252"),
        ("<meta http-equiv='Content-Type' content='text/html; charset=koi8-r'>", "koi8_r"),
        ('<?xml version="1.0" encoding="Shift_JIS"?>', "cp932"),
        ("<meta charset=gb2312>", "gb18030"),
        ("# -*- coding: latin-1 -*-\n", "cp1252"),
        ("#!/usr/bin/python\n# vim: set fileencoding=koi8-r :\n", "koi8_r"),
    ],
)
def test_declared_encodings_are_used(declared: str, encoding: str) -> None:
    text = {"cp1252": "né “Ö”", "koi8_r": "мел", "cp932": "日本", "gb18030": "北京"}[encoding]
    data = f"{declared}{text} <p>".encode(encoding)
    assert decoded(data) == (data.decode(encoding), "")


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("latin-1", "utf-8"), ("utf-8", "cp1252"), ("shift_jis", "cp1252"), ("utf-16", "cp1252"),
        ("unicode_escape", "cp1252"), ("rot13", "utf-8"), ("nonsense", "cp1252"),
    ],
)  # fmt: skip
def test_wrong_declarations_are_not_believed(declared: str, encoding: str) -> None:
    text = f"<meta charset={declared}>" + TEXTS["de"] * 5
    assert decoded(text.encode(encoding)) == (text, "")


def test_binary_files_stay_binary() -> None:
    rng = random.Random(1)
    for size in (300, 5000, 200_000):
        assert decoded(bytes(rng.randrange(256) for _ in range(size))) is None
        assert decoded(bytes(rng.randrange(1, 256) for _ in range(size))) is None
        assert decoded(b"\xff\xfe" + bytes(rng.randrange(256) for _ in range(size))) is None
    assert decoded(b"name.txt" + b"\0" * 504 + b"The text in an archive." * 20) is None
