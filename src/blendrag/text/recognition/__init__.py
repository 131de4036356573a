"""Finding known chunks in a prompt that nobody marked up.

Owns the anchor index: hashes of how every chunk begins, and how a prompt is searched with them. Does
not know what renders prompts, how they are tokenised or where chunk texts are kept (it asks for a text
when it needs one).

How a chunk is found: the hash of the 32 characters at *every* position of the prompt (Chinese has no
word starts) is looked up among the chunks' beginnings; where it is known, the hashes of 64, 128, 256, …
characters are, until one is not. That tells chunks apart whose first pages are the same. A chunk that
may stand there whole is compared by its length and hash, in constant time from prefix sums, and at last
by its text, so a hash collision costs time and never a wrong match.

What is recognised: whole chunks of at least 45 letters or digits, and chunks whose tail is cut off, if
enough is left; both from one word boundary to another. What is not, and is computed as ordinary text:
shorter chunks, and chunks whose head is cut off. Chunks of fewer than 32 characters, which are long
enough where characters are ideographs, are found by a beginning of 16.
"""

from blendrag.text.recognition.area import MIN_LETTERS, is_recognisable
from blendrag.text.recognition.escapes import unescaped
from blendrag.text.recognition.index import AnchorIndex
from blendrag.text.recognition.rows import PACKED_BYTES, AnchorRow, packed, row_of
from blendrag.text.recognition.spans import Match

__all__ = [
    "MIN_LETTERS",
    "PACKED_BYTES",
    "AnchorIndex",
    "AnchorRow",
    "Match",
    "is_recognisable",
    "packed",
    "row_of",
    "unescaped",
]
