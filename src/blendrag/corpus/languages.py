"""Warns of texts in a language that the embedder was not trained on: search would find little.

The language is told by scripts and by frequent words, over a sample.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

#: What to use instead: it needs no prefixes in front of questions and texts.
MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
#: Names of embedders that were trained on English; others are not judged.
_ENGLISH_ONLY = re.compile(
    r"minilm-offline|(gtr|sentence)-t5-|(all|multi-qa|msmarco|nq|stsb|nli|average_word)-"
    r"|paraphrase-(minilm|mpnet|albert|distilroberta|tinybert)|(bge|gte)-(\w+-)?(micro|tiny|small|base|large)"
    r"(-en|-v\d|$)|e5-(small|base|large)|.*-en(-|$|_)|.*english"
)

#: Characters that are judged together, and such windows of a document at most.
WINDOW_CHARS, MAX_WINDOWS = 1000, 8
#: Share of the text in other languages from which there is a warning, and the least text that is judged.
WARNED_SHARE, LEAST_CHARS = 0.2, 200
#: Share of frequent words from which a text is prose of a language.
_PROSE_SHARE = 0.1

_FREQUENT = {
    "English": "the of and to in is that for it as was with be by on not are this or at from an which but",
    "German": "der die das und ist nicht ein eine zu den von mit für auf im dem des sich auch wird sind",
    "French": "le la les des et est dans un une que qui pour pas sur au du ce il sont avec par plus vous de",
    "Spanish": "el la los las de que en un una es por con no para se su como más del al lo está son",
    "Italian": "il la di che un una per non con del della sono le gli si da nel alla come anche più questo",
    "Portuguese": "os as de que do da em um uma para com não por se na no ao dos das mais são ou pelo",
    "Dutch": "de het een en van is dat niet op te voor met zijn er aan die ook bij naar wordt worden",
    "Polish": "na do nie się jest to że jak po dla od przez są oraz lub może które za być ze jego aby przy",
    "Czech": "se na je že do to pro za by jako po nebo jsou který ve tak ale podle být při od jeho může",
    "Swedish": "och att det som en är på av för med den till inte om ett har kan de vid från var ska",
    "Danish": "og at det som en er på af for med den til ikke om et har kan de ved fra skal blev",
    "Norwegian": "og at det som en er på av for med den til ikke om et har kan de ved fra skal ble",
    "Finnish": "ja on ei se että oli ovat tai kun joka mutta niin hän myös kuin ole sen jos voi sekä",
    "Hungarian": "az és hogy nem is egy ez van meg de ha csak vagy mint el volt kell után",
    "Romanian": "și de la în nu cu care pe un este din să pentru mai sunt ca se sau prin fost",
    "Turkish": "ve bir bu için ile da de olarak gibi daha çok olan ne veya kadar var olduğu her en sonra",
    "Indonesian": "yang dan di untuk dengan dari ini itu tidak pada dalam adalah atau akan juga ke oleh",
    "Vietnamese": "và của là có không được cho các một người trong những với này để khi từ đã về",
}
_WORDS = {language: frozenset(words.split()) for language, words in _FREQUENT.items()}
_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}


class Languages:
    """Languages of the texts that were added, by share of characters."""

    def __init__(self) -> None:
        self._chars: Counter[str] = Counter()
        self._rest = ""
        """Short texts, judged together."""

    def add(self, text: str) -> None:
        if len(text) < WINDOW_CHARS:
            self._rest += f"{text}\n"
            if len(self._rest) >= WINDOW_CHARS:
                self._judge(self._rest, len(self._rest))
                self._rest = ""
            return
        windows = min(MAX_WINDOWS, len(text) // WINDOW_CHARS)
        each = len(text) // windows
        for number in range(windows):
            self._judge(text[number * each : number * each + WINDOW_CHARS], each)

    def _judge(self, window: str, chars: int) -> None:
        self._chars[language_of(window)] += chars

    def warning(self, embedder: str) -> str:
        """What to tell the user of texts that this embedder does not know; empty if there are few."""
        if not is_english_only(embedder):
            return ""
        chars = self._chars + Counter({language_of(self._rest): len(self._rest)})
        foreign = {name: count for name, count in chars.items() if name not in ("", "English")}
        share = sum(foreign.values()) / max(1, chars.total())
        if share < WARNED_SHARE or chars.total() < LEAST_CHARS:
            return ""
        language = max(foreign, key=lambda name: foreign[name])
        return (
            f"{share:.0%} of the new text is not English (most of that {language}), but embedder {embedder} "
            "was trained on English, so questions will often find the wrong chunks; ingest into a new store "
            f"with a multilingual one, such as --embedder {MULTILINGUAL}"
        )


def is_english_only(embedder: str) -> bool:
    """By the model's name, with any directory or owner in front of it."""
    name = embedder.rstrip("/").rpartition("/")[2].lower()
    return bool(_ENGLISH_ONLY.match(name)) and "multilingual" not in name


def language_of(text: str) -> str:
    """The language of some prose, or its script; empty for text that is none, such as code and numbers."""
    letters = [char for char in text if char.isalpha()]
    scripts = Counter(unicodedata.name(char, "").partition(" ")[0] for char in letters)
    others = sum(count for script, count in scripts.items() if script not in ("LATIN", ""))
    if others > len(letters) / 2 and others >= 10:
        if scripts["HIRAGANA"] + scripts["KATAKANA"] > others / 10:
            return "Japanese"
        script = max((s for s in scripts if s not in ("LATIN", "")), key=lambda s: scripts[s])
        return _SCRIPTS.get(script, f"in {script.title()} script")
    words = re.findall(r"[^\W\d_]{2,}", text.lower())
    if len(words) < 8:
        return ""
    shares = {
        language: sum(word in frequent for word in words) / len(words)
        for language, frequent in _WORDS.items()
    }
    english = shares.pop("English")
    best = max(shares, key=lambda language: shares[language])
    if shares[best] >= _PROSE_SHARE and shares[best] > 1.5 * english:
        return best
    return "English" if english >= _PROSE_SHARE else ""
