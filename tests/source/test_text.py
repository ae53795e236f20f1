import ast

import pytest

from rearview.source.text import decode, encode, newline, split, try_parse


def test_lines_are_counted_as_python_counts_them():
    text = "a = 1\x0c\r\nb = '\u2028'\rc = 3"
    assert split(text) == ["a = 1\x0c\r\n", "b = '\u2028'\r", "c = 3"]
    assert ast.parse(text).body[-1].lineno == 3


@pytest.mark.parametrize(
    "data",
    [
        b"x = 1\n",
        b"\xef\xbb\xbfx = 1\n",
        b"# -*- coding: latin-1 -*-\nname = '\xe9'\n",
        b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nname = '\x80'\n",
        b"name = '\xff\xfe' # not UTF-8\n",
        b"# coding: no-such-code\nx = '\xc3\xa9'\n",
    ],
)
def test_encoding_decoded_bytes_returns_the_same_bytes(data):
    assert encode(decode(data), data) == data


def test_a_coding_cookie_is_obeyed():
    assert decode(b"# coding: latin-1\n'\xe9'") == "# coding: latin-1\n'\u00e9'"


def test_text_that_is_not_utf_8_still_parses():
    assert not isinstance(try_parse(decode(b"x = '\xff'\n")), str)


def test_the_line_end_is_the_nearest_one():
    lines = ["a\n", "b\n", "c\r\n", "d\r\n", "e"]
    assert newline(lines, 0) == "\n"
    assert newline(lines, 4) == "\r\n"
    assert newline([], 0) == "\n"


@pytest.mark.parametrize(
    "text",
    [
        "print 'loss', loss\n",
        "print\n",
        "if x: print 'a'\n",
        "print >>log, 'a', b\n",
        "print ('%d' % 3) % ()\n",
        "try:\n    f()\nexcept ValueError, e:\n    raise TypeError, 'no'\n",
        "exec 'x = 1'\n",
    ],
)
def test_python_2_is_read_line_for_line(text):
    text += "print 'end'\n"  # which alone makes it Python 2
    found = try_parse(text)
    assert found.repaired
    assert len(found.code_lines) == len(found.lines)
    assert found.text == text


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\0'\n", "(" * 5000, "if x:\n"])
def test_a_text_that_does_not_parse_is_reported_with_its_line(text):
    assert "parse" in try_parse(text)
