"""What a model wrote, on a terminal."""

import pytest

from dilated_attention_pytorch.cli.printing import decoded_bytes, decoded_tokens, escaped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"),
        ("a\rb\x00\x7f\x9b", "a\\x0db\\x00\\x7f\\x9b"),
        ("évil\u202etxt", "évil\\u202etxt"),
        ("日本 🙂 \ufffd", "日本 🙂 \ufffd"),
        ("\ud800", "\\ud800"),
    ],
)
def test_no_character_controls_the_terminal(text, shown):
    assert escaped(text) == shown


@pytest.mark.parametrize("content", ["abc", "é", "日本語", "🙂a🙂", "\x1b"])
def test_bytes_come_out_as_whole_characters(content):
    data = content.encode()
    parts = list(decoded_bytes(data))
    assert "".join(parts) == content
    assert [p for p in parts if p] == list(content)


@pytest.mark.parametrize(
    "data", [b"\xff", b"a\xc3", b"\xc3a", b"\xf0\x9f\x99", b"\xe6\x97\xe6\x97\xa5", bytes(range(256))]
)
def test_bytes_that_are_no_text_are_what_python_decodes(data):
    assert "".join(decoded_bytes(data)) == data.decode("utf-8", errors="replace")


def test_tokens_come_out_as_whole_characters():
    """A tokenizer of bytes, three to a character here; and one that drops a leading space, as sentencepiece does."""
    text = "a日本🙂b"
    parts = list(decoded_tokens(b"x", text.encode(), lambda ids: bytes(ids).decode("utf-8", errors="replace")))
    assert parts == list(text)
    words = ["▁one", "▁two", "▁", "three"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")  # noqa: E731
    assert "".join(decoded_tokens([0], [1, 2, 3], decode)) == " two three"
    assert "".join(decoded_tokens([], [0, 1, 2, 3] * 5, decode)) == decode([0, 1, 2, 3] * 5)


def test_what_never_becomes_a_character_is_shown_at_the_end():
    decode = lambda ids: bytes(ids).decode("utf-8", errors="replace")  # noqa: E731
    assert "".join(decoded_tokens([], b"a\xf0\x9f", decode)) == "a\ufffd"
