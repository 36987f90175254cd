"""Read one YAML document by the rules of YAML 1.2.

PyYAML's own loaders follow YAML 1.1: `12:00:00` is 43200 there, `no` is false, `1e-4` is text, and of two equal keys
the first is lost without a word. So only its parser is used; scalars, keys and limits are decided here. Anchors,
aliases, merge keys and tags are refused outright: a config is short, and each of them hides what a line means.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from pipeline.config.yaml12_errors import syntax_problem
from pipeline.errors import UserError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 128 * 1024  # PyYAML's parser reads 200 kB/s at worst; no config that a person wrote is a tenth of this
MAX_NODES = 5_000  # and 25,000 nodes/s
MAX_DEPTH = 32  # the deepest key of a config lies on level 4

NULL = re.compile(r"~|null|Null|NULL|")
TRUE, FALSE = re.compile(r"true|True|TRUE"), re.compile(r"false|False|FALSE")
INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
INFINITE, NAN = re.compile(r"[-+]?\.(inf|Inf|INF)"), re.compile(r"\.(nan|NaN|NAN)")
LONGEST_NUMBER = 100  # characters; a longer one stays text: int() takes quadratic time and stops at 4300 digits

# Not printable (YAML 1.2, 5.1), and the three that PyYAML, but not YAML 1.2, takes for the end of a line.
UNWELCOME = "[^\t\n\r -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"  # slow to compile
UNWELCOME_ASCII = re.compile("[^\t\n\r -~]")
SURROGATE = re.compile("[\ud800-\udfff]")


class Place(NamedTuple):
    """Where something was written. `order` 0 is the file, 1… are the overrides; these have no line."""

    source: str
    line: int = 0
    column: int = 0
    order: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class YamlError(UserError):
    """The text is not the YAML that we read; says `file:line: what; what to do`."""

    def __init__(self, place: Place, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place, self.problem = place, problem


@dataclass
class Document:
    """Plain data (dict, list, str, int, float, bool, None), and for each key path where and how it was written.

    `raw` holds unquoted scalars as they were typed: 0123, 3.10, 1e-4.
    """

    data: Any
    source: str
    places: dict[KeyPath, Place] = field(default_factory=dict)
    raw: dict[KeyPath, str] = field(default_factory=dict)

    def written(self, path: KeyPath) -> KeyPath:
        """Return `path` as it was written, or the nearest that it lies in."""
        found: KeyPath = ()
        for part in path:
            if (*found, part) in self.places:
                found = (*found, part)
            elif not isinstance(part, int):  # `prompts: x` stands for `prompts: [x]`: its item 0 is the key itself
                break
        return found

    def place(self, path: KeyPath) -> Place:
        """Return where `path` was written, or the nearest that it lies in."""
        return self.places.get(self.written(path), Place(self.source, 1))


def load_document(path: Path, kind: str = "config", example: str = "name: my-model") -> Document:
    """Read the one YAML mapping in the file at `path`; UserError where that cannot be."""
    source = shown_path(path)
    document = parse_document(_decode(_read(path, source), source), source)
    if isinstance(document.data, dict):
        return document
    place = document.place(())
    if document.data is None:
        _fail(place, f"the file is empty; write at least `{example}`")
    if isinstance(document.data, list):
        _fail(place, f"a list is not a {kind}; write keys with values at the top, for example `{example}`")
    text = document.raw.get((), str(document.data))
    hint = f"; put a blank after the colon: `{text.replace(':', ': ', 1)[:60]}`" if re.match(r"\w+:\S", text) else ""
    _fail(place, f"{shown(text)} is no key with a value{hint or f'; write for example `{example}`'}")


def parse_document(text: str, source: str, *, order: int = 0) -> Document:
    """Parse one YAML value of any kind from `text`. With `order` > 0 (an override) places have no lines."""
    composer = _Composer(source, order)
    composer.refuse_invisible(text)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            composer.take(event)
    except yaml.MarkedYAMLError as error:
        line, column, problem = syntax_problem(error, text)
        _fail(composer.place(line, column), problem)
    except (yaml.YAMLError, ValueError, OverflowError):  # ValueError: "\U00110000" goes to chr() unchecked
        _fail(composer.last, 'after this place, a number or an escape like "\\U00110000" is out of range; mend it')
    if order and text[composer.end :].strip():
        _fail(composer.last, "text from ` #` on is a comment in YAML; put quotes around the whole value")
    return composer.document


class _Open(NamedTuple):
    """A mapping or list whose end has not been read yet; `key` holds the key that waits for its value."""

    path: KeyPath
    value: dict[str, Any] | list[Any]
    key: list[str]


class _Composer:
    """Build plain data from parser events, with a stack of its own: no depth can exhaust Python's."""

    def __init__(self, source: str, order: int) -> None:
        self.source, self.order = source, order
        self.document = Document(None, source)
        self.stack: list[_Open] = []
        self.nodes = self.documents = self.end = 0
        self.last = self.place(0, 0)

    def place(self, line: int, column: int) -> Place:
        """Make a Place of PyYAML's zero-based numbers."""
        return Place(self.source, 0 if self.order else line + 1, column + 1, self.order)

    def refuse_invisible(self, text: str) -> None:
        """Refuse characters that nobody can see."""
        if found := (UNWELCOME_ASCII.search(text) if text.isascii() else re.search(UNWELCOME, text)):
            place = self.place(*_line_and_column(text, found.start()))
            escape = f"\\u{ord(found[0]):04x}"
            _fail(place, f'the character U+{ord(found[0]):04X} is not allowed here; write "{escape}" in double quotes')

    def take(self, event: yaml.Event) -> None:
        """Take the next event of the parser."""
        if event.start_mark is not None:
            self.last = self.place(event.start_mark.line, event.start_mark.column)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent) and event.end_mark is not None:
            self.end = event.end_mark.index
        if isinstance(event, yaml.DocumentStartEvent):
            self._start_document(event)
        elif isinstance(event, yaml.AliasEvent):
            _fail(self.last, f"the alias *{event.anchor} is not allowed; write the value itself, or quote the text")
        elif isinstance(event, yaml.NodeEvent):
            self._start_node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.stack.pop()

    def _start_document(self, event: yaml.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            _fail(self.last, "a second document begins here; one file holds one config, remove the `---`")
        if event.version not in (None, (1, 2)) or event.tags:
            _fail(self.last, "the % line is not allowed: files are read as YAML 1.2; remove it")

    def _start_node(self, event: yaml.NodeEvent) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            _fail(self.last, f"more than {MAX_NODES:,} keys and values; for many files write a glob or a folder")
        if event.anchor is not None:
            _fail(self.last, f"the anchor &{event.anchor} is not allowed; write values out, or quote the text")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            _fail(self.last, f"the tag {shown(event.tag)} is not allowed; remove it, or quote text that begins with !")
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        else:
            self._open({} if isinstance(event, yaml.MappingStartEvent) else [])

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        text: str = event.value
        if SURROGATE.search(text):
            _fail(self.last, 'a "\\ud800"…"\\udfff" escape is half a character; write the character itself')
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and not top.key:
            self._key(top, text, plain=event.style is None)
            return
        path = self._add(resolve(text) if event.style is None else text)
        if event.style is None:
            self.document.raw[path] = text

    def _key(self, top: _Open, text: str, *, plain: bool) -> None:
        path = (*top.path, text)
        if plain and text == "<<":
            _fail(self.last, "the merge key << is not allowed; write the keys out")
        if not text:
            _fail(self.last, "a key is missing before the colon")
        if path in self.document.places:
            first = self.document.places[path]
            where = f"in line {first.line} and again in line {self.last.line}" if first.line else "twice"
            _fail(self.last, f"the key {shown(text)} is written {where}; keep one of them")
        self.document.places[path] = self.last
        top.key.append(text)

    def _add(self, value: Any) -> KeyPath:
        """Put `value` where it belongs and return its path."""
        if not self.stack:
            self.document.data = value
            self.document.places[()] = self.last
            return ()
        top = self.stack[-1]
        if isinstance(top.value, dict):
            key = top.key.pop()
            top.value[key] = value
            return (*top.path, key)
        path = (*top.path, len(top.value))
        top.value.append(value)
        self.document.places[path] = self.last
        return path

    def _open(self, value: dict[str, Any] | list[Any]) -> None:
        if self.stack and isinstance(self.stack[-1].value, dict) and not self.stack[-1].key:
            _fail(self.last, "a list or mapping cannot be a key; a key is text")
        if len(self.stack) == MAX_DEPTH:
            _fail(self.last, f"more than {MAX_DEPTH} lists and mappings in each other; no config is that deep")
        self.stack.append(_Open(self._add(value), value, []))


def resolve(text: str) -> Any:
    """Return what an unquoted scalar means in YAML 1.2's core schema."""
    if len(text) > LONGEST_NUMBER:
        return text
    if NULL.fullmatch(text):
        return None
    if TRUE.fullmatch(text) or FALSE.fullmatch(text):
        return text.lower() == "true"
    if INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if INFINITE.fullmatch(text) or NAN.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _fail(place: Place, problem: str) -> NoReturn:
    raise YamlError(place, problem)


def _line_and_column(text: str, index: int) -> tuple[int, int]:
    """Return the zero-based line and column of a character."""
    return text.count("\n", 0, index), index - text.rfind("\n", 0, index) - 1


def shown(text: str, limit: int = 60) -> str:
    """Quote text for a message: cut, and with nothing in it that a terminal would obey."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def shown_path(path: Path) -> str:
    """Name a file in a message; with quotes where its name holds more than printable characters."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def _read(path: Path, source: str) -> bytes:
    """Read a regular file of bounded size; a device or a pipe could be endless, or never begin."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{source}: is a folder; name a YAML file in it")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{source}: is not a file on disk; save the config to a file first")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{source}: no such file{_nearest(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{source}: cannot be read: {reason}; check the name and its permissions") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{source}: is larger than {MAX_BYTES // 1024} KiB, which no config is; is it the right file?")
    return content


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return "; check the path"
    near = get_close_matches(path.name, names, n=1)
    return f"; did you mean {shown_path(path.with_name(near[0]))}?" if near else "; check the path"


def _decode(content: bytes, source: str) -> str:
    """Decode UTF-8, with or without a byte order mark."""
    advice = "save the file as UTF-8"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{source}:1: the file is UTF-16 (byte offset 0); {advice}")
    if (nul := content.find(b"\0")) >= 0:
        line = content.count(b"\n", 0, nul) + 1
        raise UserError(f"{source}:{line}: a NUL byte at byte offset {nul}: UTF-16, or not a text file; {advice}")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{source}:{line}: not UTF-8 text at byte offset {error.start}; {advice}") from None
