"""Rows of a .json file: a list of objects; or objects one after the other, on one line each or spread over several.

Guarantees: the file moves through a window of text, so memory holds a few rows, however long the file. A list that is
broken in one place cannot be read on from there: that error is raised whatever `bad` does.
"""

import json
from typing import BinaryIO

from data_pipeline.files import File
from data_pipeline.rows import BOM, BadRow, Numbered, Part, as_row, broken, decode, json_problem, unique
from raycp.errors import DataError

_CHUNK = 1 << 20
_LONGEST = 1 << 30  # characters of one row; longer: a string whose end quote is missing


class _JsonText:
    """A .json file as a window of text that moves on: what was read is let go."""

    def __init__(self, file: File, stream: BinaryIO) -> None:
        self.file, self.stream = file, stream
        self.text, self.place, self.line, self.ended = "", 0, 1, False
        self._rest = b""
        self._decoder = json.JSONDecoder(object_pairs_hook=unique)
        self.more()

    def more(self) -> None:
        """Reads on, at least as much as is in the window, so that a long row is decoded few times."""
        raw = self.stream.read(max(_CHUNK, len(self.text) - self.place))
        self.ended = not raw
        first_line = self.line + self.text.count("\n", self.place)
        if first_line == 1 and not self.text:
            raw = raw.removeprefix(BOM)
        whole = self._rest + raw
        cut = len(whole) if self.ended else _whole_characters(whole)
        self.text = self.text[self.place :] + decode(whole[:cut], self.file, first_line)
        self.place, self._rest = 0, whole[cut:]

    def peek(self) -> str:
        """Next character that is no white space, or "" at the end."""
        while True:
            size = len(self.text)
            place = self.place
            while place < size and self.text[place] in " \n\r\t":
                place += 1
            self.line += self.text.count("\n", self.place, place)
            self.place = place
            if place < size or self.ended:
                return self.text[place : place + 1]
            self.more()

    def skip(self) -> None:
        self.place += 1

    def skip_line(self) -> None:
        """Moves to the start of the next line."""
        while (end := self.text.find("\n", self.place)) < 0 and not self.ended:
            self.more()
        self.place = len(self.text) if end < 0 else end + 1
        self.line += end >= 0

    def value(self) -> object:
        """The value that begins here.

        Raises:
            ValueError, RecursionError: it is broken.
        """
        while True:
            try:
                value, end = self._decoder.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - 16
                if self.ended or not cut_off or len(self.text) - self.place > _LONGEST:
                    raise
                self.more()
            else:
                self.line += self.text.count("\n", self.place, end)
                self.place = end
                return value


def _whole_characters(raw: bytes) -> int:
    """Length of `raw` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(raw) if back >= needed else len(raw) - back
        if byte < 0x80:
            break
    return len(raw)


def read_json(part: Part, bad: BadRow) -> Numbered:
    """A list of rows; or objects one after the other, on one line each or spread over several."""
    file = part.file
    with file.open() as stream:
        text = _JsonText(file, stream)
        if text.peek() == "[":
            yield from _read_json_list(file, text, bad)
            return
        while text.peek():
            line = text.line
            try:
                yield line, as_row(text.value(), file, line)
            except DataError as error:
                bad(error)
            except (ValueError, RecursionError) as error:
                bad(_broken_value(text, line, error, "repair the object; a .json file has a list of rows, or objects"))
                text.skip_line()


def _read_json_list(file: File, text: _JsonText, bad: BadRow) -> Numbered:
    text.skip()
    separator = False
    while (character := text.peek()) != "]":
        if separator:
            if character != ",":
                shown = text.text[text.place : text.place + 40]
                raise broken(file, text.line, f"want ',' or ']' here: {shown!r}", "repair the JSON list")
            text.skip()
            text.peek()
        line = text.line
        try:
            value = text.value()
        except (ValueError, RecursionError) as error:
            raise _broken_value(text, line, error, "repair the JSON list of rows") from error
        try:
            row = as_row(value, file, line)
        except DataError as error:
            bad(error)
        else:
            yield line, row
        separator = True


def _broken_value(text: _JsonText, line: int, error: ValueError | RecursionError, fix: str) -> DataError:
    at = line
    if isinstance(error, json.JSONDecodeError):
        at += text.text.count("\n", text.place, error.pos)
    found = broken(text.file, at, f"broken JSON, {json_problem(error)}", fix)
    found.__cause__ = error
    return found
