"""YAML as people mean it, and a clear word for everything that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.yaml12 import Document, load_document, parse_document
from pipeline.config.yaml12_dump import dump
from pipeline.errors import UserError


def value_of(text: str) -> Any:
    return parse_document(f"key: {text}", "x.yaml").data["key"]


def refusal(path: Path, content: str | bytes) -> str:
    """Write `content` to a file, load it, and return the message without the folder."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        load_document(path)
    return str(error.value).replace(str(path), "x.yaml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e4", 10000.0),
        ("6e-5", 6e-5),
        ("1.0e4", 10000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("0o17", 15),
        ("0xff", 255),
        ("0123", 123),
        ("+3", 3),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        # words in 1.2, something else in 1.1
        ("no", "no"),
        ("on", "on"),
        ("12:00:00", "12:00:00"),
        ("8:00:00", "8:00:00"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("3e", "3e"),
        ("nan", "nan"),
        ("0b11", "0b11"),
        ("'true'", "true"),
        ('"1"', "1"),
        ("9" * 5000, "9" * 5000),  # int() refuses so many digits
        ("[a, 1, [true]]", ["a", 1, [True]]),
        ("{on: 1, 2: b}", {"on": 1, "2": "b"}),  # keys are always text, as they are written
    ],
)
def test_scalars_are_read_by_yaml_1_2(text: str, value: Any) -> None:
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_places_and_raw_texts_are_kept() -> None:
    document = parse_document("a: 0123\nb:\n  - 3.10\n  - {c: 'x'}\n", "x.yaml")
    assert document.raw == {("a",): "0123", ("b", 0): "3.10"}
    assert document.place(("b",))[:3] == ("x.yaml", 2, 1)
    assert document.place(("b", 1, "c"))[:3] == ("x.yaml", 4, 6)
    assert str(document.place(("b", 1, "nothing", "like", "it"))) == "x.yaml:4"


def test_a_byte_order_mark_is_accepted(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfname: x\r\nseed: 1\r\n")
    assert load_document(file).data == {"name": "x", "seed": 1}


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "duplicate": ("lr: 1\nx: 2\nlr: 3", "x.yaml:3: the key 'lr' is written in line 1 and again in line 3"),
    "duplicate section": ("train:\n  a: 1\ntrain:\n  b: 2", "line 1 and again in line 3"),
    "duplicate deep": (
        "a: [{b: {c: 1,\n c: 2}}]",
        "x.yaml:2: the key 'c' is written in line 1 and again in line 2",
    ),
    "duplicate after quotes": ("a: 1\n'a': 2", "line 1 and again in line 2"),
    "tab": ("a:\n\tb: 1", "x.yaml:2: a tab; indent and separate with blanks"),
    "tab between": ("a:\t1", "x.yaml:1: a tab"),
    "bad indentation": ("a:\n  b: 1\n c: 2", "x.yaml:3: this line does not fit what began in line 1"),
    "no blank": ("a:1", "put a blank after the colon: `a: 1`"),
    "no blank, further lines": ("a:1\nb: 2", "x.yaml:1: a blank is missing after the colon"),
    "list": ("- a\n- b", "x.yaml:1: a list is not a config"),
    "word": ("hello", "x.yaml:1: 'hello' is no key with a value"),
    "empty": ("", "x.yaml:1: the file is empty; write at least `name: my-model`"),
    "only comments": ("# nothing\n", "the file is empty"),
    "two documents": ("a: 1\n---\nb: 2", "x.yaml:2: a second document begins here"),
    "item among keys": ("a: 1\n- b", "x.yaml:2: a list item among keys"),
    "no colon": ("a: 1\nb\nc: 2", "x.yaml:2: a colon is missing after the key"),
    "open quote": ("a: 'b\nc: 1\n", "x.yaml:1: the quote opened in line 1 is not closed"),
    "open list": ("a: [1,\nb: 2\n", "the list opened by [ in line 1 is broken here"),
    "open mapping": ("a: {b: 1\n", "the mapping opened by { in line 1 is broken here"),
    "second colon": ("prompt: def f(x): return", "x.yaml:1: a second colon in one value"),
    "glob": ("data: *.txt", "x.yaml:1: text that begins with * or & must stand in quotes"),
    "question": ("a: ? b", "x.yaml:1: text that begins with ? must stand in quotes"),
    "at": ("data: @here", "x.yaml:1: text cannot begin with @"),
    "escape": ('a: "C:\\data"', "\\d means nothing in double quotes"),
    "huge escape": ('a: "\\UFFFFFFFF"', "out of range"),
    "text after quotes": ("a: 'b' c", "text after the closing quote"),
    "no key": (": 1", "x.yaml:1: a key is missing before the colon"),
    "list as key": ("[a]: 1", "x.yaml:1: a list or mapping cannot be a key"),
    "python tag": (
        "a: !!python/object:os.system x",
        "x.yaml:1: the tag 'tag:yaml.org,2002:python/object:os.system'",
    ),
    "harmless tag": ("a: !!str 1", "x.yaml:1: the tag 'tag:yaml.org,2002:str' is not allowed"),
    "anchor": ("a: &x 1", "x.yaml:1: the anchor &x is not allowed"),
    "alias": ("a: *x", "x.yaml:1: the alias *x is not allowed"),
    "merge": ("<<: {a: 1}", "x.yaml:1: the merge key << is not allowed"),
    "old directive": ("%YAML 1.1\n---\na: 1", "files are read as YAML 1.2"),
    "UTF-16": ("a: 1".encode("utf-16"), "x.yaml:1: the file is UTF-16 (byte offset 0); save the file as UTF-8"),
    "UTF-16 without mark": ("a: 1".encode("utf-16-le"), "x.yaml:1: a NUL byte at byte offset 1"),
    "NUL": (b"a: 1\nb: \x00", "x.yaml:2: a NUL byte at byte offset 8"),
    "not UTF-8": (b"a: 1\nb: caf\xe9", "x.yaml:2: not UTF-8 text at byte offset 11"),
    "control character": ("a: \x1b[31m", 'x.yaml:1: the character U+001B is not allowed here; write "\\u001b"'),
    "line separator": ("a: 'x\u2028y'", "x.yaml:1: the character U+2028 is not allowed here"),
    "half a character": ('a: "\\ud83d"', "is half a character"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_files_are_refused_with_line_and_advice(file: Path, content: str | bytes, message: str) -> None:
    assert message in refusal(file, content)


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("name: x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "tinny.yaml": "no such file; did you mean",
        "nowhere/x.yaml": "no such file; check the path",
        ".": "is a folder; name a YAML file in it",
        "pipe": "is not a file on disk; save the config to a file first",
        "loop": "cannot be read: Too many levels of symbolic links",
        "x" * 300: "cannot be read: File name too long",
        "x\0y": "cannot be read: embedded null byte",
        "tiny.yaml/x": "cannot be read: Not a directory",
    }.items():
        with pytest.raises(UserError) as error:
            load_document(tmp_path / name)
        assert message in str(error.value)
        assert "\0" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(file: Path) -> None:
    file.write_text("name: x")
    file.chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        load_document(file)


BOMBS = {
    "deep lists": "a: " + "[" * 10_000,
    "deep lists with items": "[a," * 40_000,
    "deep mappings": "a: " + "{a: " * 10_000,
    "deep items": "- " * 60_000,
    "laughs": "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n" for i in range(9)),
    "many keys": "".join(f"k{i}: 1\n" for i in range(12_000)),
    "many items": "[" + "a," * 60_000 + "]",
    "shallow lists": "[" + ("[" * 30 + "]" * 30 + ",") * 2000 + "]",
    "directives": "%a\n" * 40_000,
    "folded": "a: >\n" + " x\n" * 43_000,
    "long text": "a: " + "x" * 130_000,
    "long key": "a" * 130_000 + ": 1",
    "comments": "#\n" * 65_000,
    "too large": "#" * 10_000_000,
}

MEASURE = """
import sys
from pathlib import Path
from pipeline.errors import UserError
from pipeline.config.yaml12 import load_document
for path in map(Path, sys.argv[1:]):
    try:
        load_document(path)
    except UserError:
        pass
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


def test_bombs_end_soon_and_within_200_megabytes(tmp_path: Path) -> None:
    for name, text in BOMBS.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in BOMBS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) < 200


@given(st.one_of(st.binary(max_size=60), st.text("ab:-[]{}'\"\\#&*!|>%@? \t\n01.,~<", max_size=40).map(str.encode)))
def test_no_content_ever_raises_anything_but_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(load_document(path), Document)
    except UserError as error:
        assert str(error).startswith(f"{path}:")


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    "12:00:00 no on y ON 1e-4 1_000 0o7 08 .5 ~ null True = << 2024-01-01 3.10 -.inf - ? # & * ! % @ ` | >".split()
)
SCALARS = (
    TEXTS
    | st.booleans()
    | st.none()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
)
LEAVES = SCALARS | st.lists(SCALARS | st.dictionaries(TEXTS.filter(bool), SCALARS, max_size=3), max_size=4)
MAPPINGS = st.dictionaries(
    TEXTS.filter(bool), LEAVES | st.dictionaries(TEXTS.filter(bool), LEAVES, max_size=4), min_size=1, max_size=4
)


@given(MAPPINGS)
def test_what_is_dumped_reads_back_in_yaml_1_1_and_1_2(value: dict[str, Any]) -> None:
    text = dump(value)
    assert parse_document(text, "x").data == value
    assert yaml.safe_load(text) == value
