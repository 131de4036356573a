"""Names of people, companies and towns, dealt to splits so that none is ever in two of them.

Owns: the word parts that names are built from and the rule that sends a word to a split. Does not know: documents,
questions, the tokenizer. Words are composed of parts that all splits share, so that a held-out name is new as a word and
yet made of pieces that a tokenizer trained on the other names can spell.
"""

import random
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

GIVEN_STARTS = (
    "Al An Ar Bel Ber Bran Bri Cal Car Ced Clar Cor Dal Dar Del Dor Ed El Em Er Est Fen Flor Fred Gal Ger Gil Had Hal "
    "Har Hel Her Hu Il In Is Jan Jor Jul Kar Kel Kir Lan Leo Lor Lu Mal Mar Mel Mer Mil Nel Nor Ol Or Os Per Pet Ral "
    "Ren Ros Row Sal Sel Sig Syl Tal Ted Tor Val Ver Vin Wil Win Zel"
).split()
FEMALE_ENDS = (
    "a aline anna ela elle ena essa etta ia ina ine ira issa ita olyn ora otta wen yn".split()
)
MALE_ENDS = "ard aric ek ert ian ic ilo in mund o old on oric rick tin ton us vin ward win".split()
SURNAME_STARTS = (
    "Ash Bar Beck Birk Black Brad Brook Burn Cald Carl Chad Clay Cran Dray Dun East Ell Fair Fal Far Fern Garr Glen "
    "Gold Gran Green Grim Had Hart Hazel Heath Hol Hunt Ken King Lang Lin Lock Long Lyn Marl Mill Mor New Nor Oak Old "
    "Pen Pres Quin Red Ridge Rock Rush Sand Shel Stan Stone Sut Thorn Under Wal Ward West Whit Wild Wood York"
).split()
SURNAME_ENDS = "bourne bury by combe cott croft dale den er field ford gate ham hurst ing land ley low man more".split()
SURNAME_ENDS += "nell ridge shaw son stead stone ton wall well wick wood worth".split()
TOWN_STARTS = (
    "Aber Amber Bal Bram Brin Cam Castel Crick Dart Dell Eden Fair Frost Gor Grey Hal Haver Hex Ilm Inver Kel Kes Lach "
    "Lam Lor Mal Mel Mont Nant Never Os Over Pad Port Quor Raven Riv Rown Sal Sever Shel Silver Tam Tid Tor Trel Up Ves "
    "Wen Wex Winter Yar"
).split()
TOWN_ENDS = "beck berg bridge burgh bury chester cliff dale fell ford gate haven holm mere minster mouth".split()
TOWN_ENDS += "pool port quay ridge sea stead stow ton vale wick water".split()
SECTORS = (
    "Instruments Foods Textiles Motors Systems Papers Ceramics Tools Optics Glass Mills Foundry Press Works Timber "
    "Chemicals"
).split()
NAME_PARTS: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (GIVEN_STARTS, FEMALE_ENDS),
    (GIVEN_STARTS, MALE_ENDS),
    (SURNAME_STARTS, SURNAME_ENDS),
    (TOWN_STARTS, TOWN_ENDS),
)


def split_of(word: str) -> Split:
    """The one split in which `word` may be (part of) a name: 7 of 10 words train, 1 validates, 2 test."""
    bucket = zlib.crc32(word.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


@cache
def _words(kind: str, split: Split) -> tuple[str, ...]:
    starts, ends = {
        "female": (GIVEN_STARTS, FEMALE_ENDS),
        "male": (GIVEN_STARTS, MALE_ENDS),
        "surname": (SURNAME_STARTS, SURNAME_ENDS),
        # A company's root must not be someone's surname or a town: that would be a shared name.
        "root": (TOWN_STARTS, SURNAME_ENDS),
        "town": (TOWN_STARTS, TOWN_ENDS),
    }[kind]
    words = sorted({start + end for start in starts for end in ends if start.lower() != end})
    return tuple(word for word in words if split_of(word) == split)


@cache
def given_names(gender: str, split: Split) -> tuple[str, ...]:
    """Given names of one gender; a word both endings produce belongs to the female list."""
    words = _words(gender, split)
    taken = frozenset(_words("female", split)) if gender == "male" else frozenset()
    return tuple(word for word in words if word not in taken)


class NameDealer:
    """Deals names of one split, no word twice until a pool is empty. Not thread-safe."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
        self._rng = rng
        self._split: Split = split
        self._used: set[str] = set()

    def person(self, gender: str) -> str:
        return f"{self.given(gender)} {self._fresh(_words('surname', self._split))}"

    def given(self, gender: str) -> str:
        return self._fresh(given_names(gender, self._split))

    def company(self) -> str:
        return f"{self._fresh(_words('root', self._split))} {self._rng.choice(SECTORS)}"

    def town(self) -> str:
        return self._fresh(_words("town", self._split))

    def _fresh(self, words: tuple[str, ...]) -> str:
        for _ in range(50):
            word = self._rng.choice(words)
            if word not in self._used:
                break
        else:  # the pool is nearly dealt out: names may repeat rather than the generator stop
            self._used.difference_update(words)
        self._used.add(word)
        return word
