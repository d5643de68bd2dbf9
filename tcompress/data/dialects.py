"""Dialects of delimited text: separator, quotes, header, decimal sign and columns to leave out."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tcompress.data.column_names import is_usual, numbered_names
from tcompress.errors import DataError, counted

SAMPLE = 2**16  # bytes that the dialect is decided from
CHUNK = 10_000  # rows that pandas takes at a time, and finds types of
# In the order in which they are tried: text has commas in every line more often than others.
_SEPARATORS = {"\t": "tab", ";": "semicolon", "|": "pipe", ",": "comma"}
_NONE = "\x1f"  # a separator that no text has: the file has one column
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_WHOLE = re.compile(r"[+-]?\d+")
_PADDED = re.compile(r"([+-]?)0+(?=\d)")  # the zeros in front of a whole number
_MAY_BE_PADDED = re.compile(rb"(?<![\d.])0\d")
_DECLARED = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # first line of files for spreadsheets

# Words such as `None` or `NA` are texts and classes like others; nothing at all is missing.
EMPTY: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}

_TYPES = ("null", "int64", "float64", "bool")  # others are text

Rows = list[list[str]]


@dataclass(frozen=True)
class Dialect:
    """Form of a file of delimited text."""

    separator: str
    quoted: bool = True  # whether quotes around a cell are no part of it
    padded: bool = False  # whether a blank follows every separator
    skipped: int = 0  # lines before the header
    escape: str | None = None  # what stands before quotes within quotes, unless they are doubled
    header: bool = True
    decimal: str = "."
    names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # names of those that are read
    rows: int = 0
    remarks: bool = False  # whether lines before the header are remarks

    @property
    def words(self) -> str:
        """The separator, and what else is unusual, in words."""
        kind = _SEPARATORS.get(self.separator)
        words = ["one column" if self.separator == _NONE else f"{kind or self.separator}-separated"]
        words += [] if self.quoted or self.separator == _NONE else ["without quoting"]
        words += [] if self.header else ["without header"]
        words += ["after remarks"] if self.remarks else []
        words += ["with backslashes before quotes"] if self.escape else []
        words += ["decimal commas"] if self.decimal == "," else []
        unread = {*self.names} - {*self.columns}
        words += ["without the numbers of rows"] if self.names and self.names[0] in unread else []
        words += ["without the empty last column"] if unread - {*self.names[:1]} else []
        return ", ".join(words)

    @property
    def form(self) -> dict[str, Any]:
        """Arguments of `csv.reader`."""
        return {
            "delimiter": self.separator,
            "quoting": csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            "skipinitialspace": self.padded,
            "escapechar": self.escape,
        }

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `pandas.read_csv`."""
        return {
            **self.form,
            "skiprows": self.skipped,
            "header": 0 if self.header else None,
            "names": list(self.names),
            "usecols": list(self.columns),
            "decimal": self.decimal,
            "index_col": False,
        }


def dialect_of(path: Path, name: str, usual: str) -> Dialect:
    """Decide the dialect of a file in UTF-8, and check that every line fits; `usual` separates.

    The separator, the header and the decimal sign are decided from the beginning of the file,
    quotes and the number of cells from all of it. `name` is for errors.
    """
    lines = _sample(path)
    declared = _DECLARED.fullmatch(lines[0]) if lines else None
    remarks = 0 if declared else _remarks(path, lines, usual)
    if declared:
        lines = lines[1:]
    elif remarks:
        lines = [line for line in lines if not line.startswith("#")]
    separator = declared[1] if declared else _separator(lines, usual)
    start = Dialect(separator, skipped=1 if declared else remarks, remarks=remarks > 0)
    scan = _fitting_scan(path, start, lines, usual, name)
    rows = _parsed(lines, scan.dialect)
    header = _has_header(rows)
    if header and scan.repeats is not None:
        text = f"`{name}`, line {scan.repeats}: the header stands there again"
        raise DataError(text, hint="remove that line")
    first = [cell.strip() for cell in scan.first]
    names = _unique(first) if header else numbered_names(len(first))
    if scan.names_rows:
        names = ("Unnamed: 0", *names)
    elif scan.width > len(names):
        names = (*names, f"Unnamed: {len(names)}")
    names = names[: scan.width]
    return replace(
        scan.dialect,
        header=header,
        decimal=_decimal(rows[header:], separator),
        names=names,
        columns=tuple(name for at, name in enumerate(names) if at not in scan.useless(header)),
        rows=scan.rows - header,
    )


def _remarks(path: Path, lines: Sequence[str], usual: str) -> int:
    """Count lines before a table that begin with `#`; such a line may be the header itself."""
    first = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if not first or first == len(lines):
        return 0
    dialect = Dialect(_separator(lines[first:], usual))
    last, next_one = _parsed(lines[first - 1 : first], dialect), _parsed(lines[first:], dialect)
    if len(next_one[0]) < 2 or len(last[0]) == len(next_one[0]):
        return 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next(at for at, line in enumerate(file) if line.strip() and line[0] != "#")


def _sample(path: Path) -> list[str]:
    """Lines at the beginning, without one that is cut off."""
    with path.open("rb") as file:
        text = file.read(SAMPLE).decode("utf-8-sig", errors="ignore")
        complete = not file.read(1)
    lines = [line for line in io.StringIO(text, newline="") if line.strip(" \r\n")]
    return lines if complete or len(lines) < 2 else lines[:-1]


def _parsed(lines: Sequence[str], dialect: Dialect) -> Rows:
    with _large_cells():
        return [row for row in csv.reader(lines, **dialect.form) if row]


@contextmanager
def _large_cells() -> Iterator[None]:
    """Let cells be longer than the library's 128 KB: documents are."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _separator(lines: Sequence[str], usual: str) -> str:
    """The first separator by which all lines have as many cells, else the likeliest one."""
    shares: dict[str, float] = {}
    for separator in _SEPARATORS:
        for quoted in (True, False):
            scan = Scan(Dialect(separator, quoted))
            rows = _parsed(lines, scan.dialect)
            for line, row in enumerate(rows, 1):
                scan.add(line, row)
            if scan.width > 1 and scan.misfit is None:
                return separator
            if len(scan.first) > 1:
                share = sum(len(row) == len(scan.first) for row in rows) / len(rows)
                shares[separator] = max(share, shares.get(separator, 0))
    if not shares:  # the first line has none of them
        return _after_remark(lines) or _NONE
    likely = max(shares, key=lambda separator: (shares[separator], separator == usual))
    # A list of sentences, some of which have commas, is no table.
    is_table = shares[likely] >= 0.5 or _has_header(_parsed(lines, Dialect(likely)))
    return likely if is_table else _NONE


def _after_remark(lines: Sequence[str]) -> str | None:
    """The separator of a table that begins after a line of something else."""
    if lines and is_usual(lines[0].strip(' \r\n"')):
        return None  # one column of texts
    for separator in _SEPARATORS:
        rows = _parsed(lines[1:], Dialect(separator))
        if len(rows) > 1 and len({*map(len, rows)}) == 1 and len(rows[0]) > 1:
            return separator
    return None


@dataclass
class Scan:
    """Numbers of cells in all rows of a file, and whether columns at its sides say nothing."""

    dialect: Dialect
    first: list[str] = field(default_factory=list)
    rows: int = 0
    lines: int = 0
    widths: dict[int, int] = field(default_factory=dict)  # with the first line that has so many
    counts: list[bool] = field(default_factory=lambda: [True, True])  # from 0, from 1
    filled: set[int] = field(default_factory=set)  # widths of rows whose last cell is not empty
    repeats: int | None = None  # the first line that is the same as the first row
    broken: int | None = None  # the first line with quotes that end before their cell does

    def add(self, line: int, row: list[str]) -> None:
        """Take a row into account, with the line that it begins in; blank lines are none."""
        if not row or (len(row) == 1 and not row[0].strip()):
            return
        self.rows += 1
        if self.rows == 1:
            self.first = row
            return
        if self.repeats is None and len(row) > 1 and row == self.first:
            self.repeats = line
        self.widths.setdefault(len(row), line)
        if row[-1].strip():
            self.filled.add(len(row))
        self.counts = [
            counts and row[0].strip() == str(number)
            for number, counts in enumerate(self.counts, self.rows - 2)
        ]

    @property
    def names_rows(self) -> bool:
        """Tell whether rows have a number in front that the header has no name for."""
        return {*self.widths} == {len(self.first) + 1} and self.rows > 1 and any(self.counts)

    @property
    def width(self) -> int:
        """Number of cells of a row that fits."""
        return max(self.widths, default=len(self.first))

    @property
    def fits(self) -> bool:
        """Tell whether all lines are rows of one table."""
        return self.broken is None and self.misfit is None and bool(self.first)

    @property
    def misfit(self) -> int | None:
        """The first line with another number of cells than the first row has."""
        first = len(self.first)
        if self.names_rows:
            return None
        ends = {first + 1} - self.filled  # in a separator
        if not "".join(self.first[-1:]).strip():
            ends.add(first - 1)
        misfits = (line for width, line in self.widths.items() if width not in {first, *ends})
        return min(misfits, default=None)

    def useless(self, header: bool) -> set[int]:
        """Columns without a name that are empty, or number the rows."""
        unnamed = self.first[0].strip() in ("", "Unnamed: 0") and header and self.rows > 1
        useless = {0} if self.names_rows or (unnamed and any(self.counts)) else set()
        last_named = bool(self.first[-1].strip()) and self.width <= len(self.first)
        if self.width > 1 and not last_named and self.width not in self.filled:
            useless.add(self.width - 1)
        return useless


def _scanned(path: Path, dialect: Dialect, *, strict: bool = True) -> Scan:
    """Scan a file; quotes that are not closed, or end before their cell does, break it."""
    scan = Scan(dialect)
    with path.open(encoding="utf-8-sig", newline="") as file, _large_cells():
        for _ in range(dialect.skipped):
            file.readline()
        reader = csv.reader(file, **dialect.form, strict=strict)
        line = 0
        try:
            for row in reader:
                scan.add(line + 1 + dialect.skipped, row)
                line = reader.line_num
        except csv.Error:
            scan.broken = line + 1 + dialect.skipped
        scan.lines = reader.line_num
    return scan


def _fitting_scan(
    path: Path, dialect: Dialect, lines: Sequence[str], usual: str, name: str
) -> Scan:
    """Scan with quotes and without, and take what fits all lines; else say which does not."""
    start = _parsed(lines, Dialect(dialect.separator, False))
    later = [cell for row in start for cell in row[1:]]
    padded = bool(later) and all(cell.startswith(" ") for cell in later if cell)
    dialect = replace(dialect, padded=padded)
    quoted = _scanned(path, dialect)
    if quoted.fits and usual != "\t" and quoted.lines == quoted.rows:
        return quoted
    if usual != "\t" and not quoted.fits and _holds(path, b'\\"'):
        escaped = _scanned(path, replace(dialect, escape="\\"))
        if escaped.fits:
            return escaped
    plain = _scanned(path, replace(dialect, quoted=False))
    # Where each line is a whole row, quotes that join lines belong to texts.
    joins = plain.width > 1 and plain.fits and plain.rows > quoted.rows
    literal = joins or (usual == "\t" and not _says_quotes(path, dialect))
    scans = [plain, quoted] if literal and _holds(path, b'"') else [quoted, plain]
    for scan in scans:
        if scan.fits:
            return scan
    lenient = _scanned(path, dialect, strict=False)
    if lenient.fits:
        return lenient
    raise _misfit(quoted, name)


def _misfit(scan: Scan, name: str) -> DataError:
    kind = _SEPARATORS.get(scan.dialect.separator, scan.dialect.separator)
    if not scan.first and scan.broken is None:
        return DataError(f"`{name}` holds no rows", hint="give other data")
    misfit = scan.misfit
    if misfit is None or (scan.broken is not None and scan.broken <= misfit):
        text = f"`{name}`, line {scan.broken}: a cell begins with a quote that does not end it"
        return DataError(text, "double the quotes within cells, and put such cells into quotes")
    width = next(width for width, line in scan.widths.items() if line == misfit)
    first = len(scan.first)
    hint = (
        "give each line as many cells, with double quotes around cells that hold the separator; "
        "or name a file with a text in each line `.txt`"
    )
    if kind == "tab" and first > 1 and min(scan.widths) >= first:
        hint = f"leave out what follows the first {first}: `cut -f1-{first} {name} > NEW.tsv`"
    return DataError(
        f"`{name}`, line {misfit}: {counted(width, f'{kind}-separated cell')}, "
        f"line {scan.dialect.skipped + 1} has {first}",
        hint,
    )


def _holds(path: Path, mark: bytes) -> bool:
    """Tell whether a line of a file has a mark."""
    with path.open("rb") as file:
        return any(mark in line for line in file)


def types_of(path: Path, dialect: Dialect) -> dict[str, str]:
    """Types of all columns, if pandas would not find them by itself; else nothing.

    It finds others in parts of a long file, and takes codes (`01` beside `1`) for numbers.
    """
    import pandas

    codes = _codes(path, dialect)
    if dialect.rows <= CHUNK and not codes:
        return {}
    types: dict[str, set[str]] = {name: set() for name in dialect.columns}
    with pandas.read_csv(path, chunksize=CHUNK, **dialect.options, **EMPTY) as chunks:
        for chunk in chunks:
            for name in types:
                kind = "null" if chunk[name].isna().all() else str(chunk[name].dtype)
                types[name].add(kind if kind in _TYPES else "string")
    if all(len(kinds) == 1 for kinds in types.values()) and not codes:
        return {}
    return {name: "string" if name in codes else _joint(kinds) for name, kinds in types.items()}


def _codes(path: Path, dialect: Dialect) -> list[str]:
    """Columns of whole numbers of which some differ in zeros in front alone: classes of their own.

    They stay as they are written. `01` to `12` are numbers still: no two of them become one.
    """
    import pandas

    with path.open("rb") as file:
        if not any(map(_MAY_BE_PADDED.search, file)):
            return []
    options = {**dialect.options, **EMPTY, "dtype": str}
    padded = dict.fromkeys(dialect.columns, False)  # columns of whole numbers; whether some are
    with pandas.read_csv(path, chunksize=CHUNK, **options) as chunks:
        for chunk in chunks:
            for name in [*padded]:
                cells = chunk[name].dropna().str.strip()
                if not cells.str.fullmatch(_WHOLE).all():
                    del padded[name]
                elif cells.str.match(_PADDED).any():
                    padded[name] = True
            if not padded:
                return []
    names = [name for name, some in padded.items() if some]
    if not names:
        return []
    columns = pandas.read_csv(path, **{**options, "usecols": names})
    written = {name: {*columns[name].dropna().str.strip()} for name in names}
    return [
        name
        for name, forms in written.items()
        if len({_PADDED.sub(r"\1", form) for form in forms}) < len(forms)
    ]


def _joint(kinds: set[str]) -> str:
    """The type that holds values of all; whole numbers and truths are never missing."""
    if len(kinds) == 1:
        return next(iter(kinds - {"null"}), "string")
    return "float64" if kinds <= {"null", "int64", "float64"} else "string"


def _says_quotes(path: Path, dialect: Dialect) -> bool:
    """Tell whether cells in quotes need them, or a column has them throughout."""
    mark, separator = f'{dialect.separator}"', re.escape(dialect.separator)
    lines, size = list[str](), 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line in file:
            if size or line.startswith('"') or mark in line:
                lines.append(line)
                size += len(line)
            if size > SAMPLE:
                break
    text = "".join(lines)
    start = f"(?:^|{separator})"
    cells = re.findall(rf'{start}("(?:[^"]|"")*")(?={separator}|\r?$)', text, re.MULTILINE)
    opened = re.findall(f'{start}"', text, re.MULTILINE)
    if not cells or len(opened) > len(cells):
        return False
    with _large_cells():
        rows = [*csv.reader(lines, delimiter=dialect.separator, quoting=csv.QUOTE_NONE)]
    columns = zip(*rows, strict=False)
    needs = all(re.search(rf'""|[\r\n{separator}]', item[1:-1]) for item in cells)
    return needs or any(
        all(item.startswith('"') and item.endswith('"') for item in column) for column in columns
    )


def _has_header(rows: Rows) -> bool:
    """Tell names of columns from the first row of data."""
    if not rows:
        return True
    first = [cell.strip() for cell in rows[0]]
    rows = [row for row in rows[1:] if row != rows[0]]  # files put together have several headers
    columns = [[row[at].strip() for row in rows if at < len(row)] for at in range(len(first))]
    if any(
        is_usual(cell) and cell not in below for cell, below in zip(first, columns, strict=True)
    ):
        return True
    if len(first) > 1 and [cell for cell in first if cell] == [
        str(number) for number in range(len(first) - (not first[0]))
    ]:
        return True  # columns that nobody named
    for cell, below in zip(first, columns, strict=True):
        numbers = below and all(_is_number(item) for item in below if item)
        # A number above numbers is one of them; a class comes again.
        if cell and ((numbers and _is_number(cell)) or cell in below):
            return False
    return not _reads_like_row([cell for cell in first if cell])


def _reads_like_row(cells: Sequence[str]) -> bool:
    """Tell sentences from names."""
    long = [len(cell.split()) >= 3 for cell in cells]
    ended = any(cell[-1] in ".!" for cell, is_long in zip(cells, long, strict=True) if is_long)
    return ended or (bool(cells) and all(long)) or any(len(cell) > 100 for cell in cells)


def _is_number(cell: str) -> bool:
    return bool(_NUMBER.fullmatch(cell) or _DECIMAL_COMMA.fullmatch(cell))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Names as pandas gives them where some are missing, or stand twice."""
    counts: dict[str, int] = {}
    unique = []
    for at, name in enumerate(names):
        name = name or f"Unnamed: {at}"
        while name in counts:
            counts[name] += 1
            name = f"{name}.{counts[name]}"
        counts[name] = 0
        unique.append(name)
    return tuple(unique)


def _decimal(rows: Rows, separator: str) -> str:
    """The decimal sign: a comma where a column has such numbers, and none has points."""
    # Whole numbers go with either sign.
    columns = [
        [cell for cell in map(str.strip, column) if cell and not _WHOLE.fullmatch(cell)]
        for column in zip(*rows, strict=False)
    ]
    points, commas = (
        any(cells and all(map(form.fullmatch, cells)) for cells in columns)
        for form in (_NUMBER, _DECIMAL_COMMA)
    )
    return "," if commas and not points and separator != "," else "."
