"""Say in plain words what PyYAML's parser stumbled over, and what to do about it."""

from __future__ import annotations

import re

import yaml

NO_BLANK_AFTER_COLON = re.compile(r"\s*(?:- )?[\w.]+:[^\s/]")

# Problems that show only later than where the mistake is.
BEGAN_EARLIER = re.compile("<stream end>|unexpected end of stream|could not find expected ':'")

# (what PyYAML says, what we say); {near} is the line in which the opened thing began. The first that fits is taken.
PROBLEMS = [
    (r"found character '\\t' that cannot start", "a tab; indent and separate with blanks"),
    (r"found character '(.)' that cannot start", "text cannot begin with {0} here; put quotes around it"),
    (
        "mapping values are not allowed",
        "a second colon in one value, or a key that is not in line with its neighbours; "
        "put quotes around text that holds ': ', or mend the indentation",
    ),
    ("mapping keys are not allowed", "text that begins with ? must stand in quotes"),
    ("sequence entries are not allowed", "a list item cannot begin here; write `- ` on a line of its own"),
    ("could not find expected ':'", "a colon is missing after the key; write `key: value`"),
    ("unexpected end of stream", "the quote opened in line {near} is not closed; add it"),
    ("unexpected document separator", "the quote opened in line {near} is not closed; add it"),
    (r"unknown escape character '(.)'", "\\{0} means nothing in double quotes; write \\\\ or use single quotes"),
    ("expected escape sequence", "an escape with too few digits in double quotes; write \\\\ or use single quotes"),
    (r"expected ',' or '\]'", "the list opened by [ in line {near} is broken here: a comma or ] is missing"),
    ("expected ',' or '}'", "the mapping opened by {{ in line {near} is broken here: a comma or }} is missing"),
    ("but found '<scalar>'", "text after the closing quote; put quotes around the whole value"),
    ("expected <block end>, but found '-'", "a list item among keys (the keys begin in line {near}); indent it"),
    ("expected <block end>, but found ':'", "a key is missing before the colon"),
    ("expected <block end>", "this line does not fit what began in line {near}; give the same indentation to both"),
    (
        "the node content, but found '<stream end>'",
        "the value ends too early; close what is open, or write it in quotes",
    ),
    (r"the node content, but found '(.*?)'", "a value was expected, but here is {0}; put quotes around text"),
    ("alphabetic or numeric", "text that begins with * or & must stand in quotes"),
    ("chomping or indentation", "text after | or > must begin on the next line"),
    ("incompatible YAML document|directive", "the % line is not allowed: files are read as YAML 1.2; remove it"),
    ("expected '<document start>'", "a key with a value was expected, for example `name: my-model`"),
    ("tag", "text that begins with ! must stand in quotes; tags are not allowed"),
]


def syntax_problem(error: yaml.MarkedYAMLError, text: str) -> tuple[int, int, str]:
    """Return the zero-based line and column of a syntax error, and what it is in words."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    said = f"{error.problem or ''} {error.context or ''}"
    if "mapping values are not allowed" in said and (culprit := _line_without_blank(text, line)) is not None:
        return culprit, 0, "a blank is missing after the colon; write `key: value`"
    near = error.context_mark.line + 1 if error.context_mark else line + 1
    if BEGAN_EARLIER.search(said) and error.context_mark:
        line, column = error.context_mark.line, error.context_mark.column
    for pattern, words in PROBLEMS:
        if found := re.search(pattern, said):
            return line, column, f"{words.format(*found.groups(), near=near)} (column {column + 1})"
    return line, column, f"this is not YAML: {error.problem} (column {column + 1})"


def _line_without_blank(text: str, line: int) -> int | None:
    """Find `a:1` in the line above `line`: the parser took both lines for one text, and complains about the second."""
    lines = text.split("\n", line + 1)[: line + 1]
    for number in (line - 1, line):
        if 0 <= number < len(lines) and NO_BLANK_AFTER_COLON.match(lines[number]):
            return number
    return None
