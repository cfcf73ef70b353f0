"""Text of a model on a terminal: nothing that it wrote moves the cursor, and no character is torn."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

KEPT = "\n\t"
# They change the order in which a terminal shows what follows.
DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escaped(text: str) -> str:
    """With control characters written out, as `\\x1b`; newlines and tabs stay."""
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in KEPT or not (unicodedata.category(character) in ("Cc", "Cs") or character in DIRECTIONS):
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def decoded_bytes(values: Iterable[int]) -> Iterator[str]:
    """Text of bytes as they come: a character when its last byte is there, U+FFFD for what is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for value in values:
        yield decoder.decode(bytes([value]))
    yield decoder.decode(b"", final=True)


def decoded_tokens(prompt: Sequence[int], tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Text of a tokenizer's tokens as they come after those of the prompt, a character when its last token is there.

    A token may look different behind others, so what is decoded begins with some that were shown already.
    """
    shown = list(prompt)[-8:]
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = _after(shown, waiting, decode)
        if not text or text.endswith("\ufffd"):
            continue
        yield text
        shown, waiting = waiting[-8:] if len(waiting) > 8 else (shown + waiting)[-8:], []
    if waiting:
        yield _after(shown, waiting, decode)


def _after(shown: list[int], waiting: list[int], decode: Callable[[list[int]], str]) -> str:
    return decode([*shown, *waiting]).removeprefix(decode(shown))
