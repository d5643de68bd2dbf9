"""All texts of the data that a user names, none left out and none cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tcompress.data.calibration import builtin_texts
from tcompress.data.chats import ChatWriter
from tcompress.data.inputs import inputs_of
from tcompress.data.tables import Kind, columns_of, content, opened
from tcompress.errors import DataError, listed
from tcompress.models import SourceModel
from tcompress.options.convert_options import Calibration

_ROWS = 1000  # read at a time


def whole_texts(
    source: SourceModel, options: Calibration, tokenizer: Any
) -> Iterator[tuple[str, list[str]]]:
    """Yield the texts of calibration data, some at a time, each with the name of its source.

    Columns are those that a calibration reads; chats are written by the tokenizer's template.
    """
    for name in options.source:
        if name == "builtin":
            yield "builtin text", builtin_texts()
            continue
        yield from _texts_of(name, source, options, tokenizer)


def _texts_of(
    name: str, source: SourceModel, options: Calibration, tokenizer: Any
) -> Iterator[tuple[str, list[str]]]:
    model, inputs = source.model_class.__name__, inputs_of(source)
    wanted: set[Kind] = {"text", "image"} if inputs.image else {"text"}
    with opened(name, options.split) as table:
        has = {*table.rows.column_names}
        named = [column for column in options.columns if column in has or len(options.source) == 1]
        columns = columns_of(table, named, wanted, {"text"}, model).get("text", ())
        label = f"{table.label}:{','.join(columns)}"
        if table.rows.info.builder_name == "text":
            label = table.label
        writer = ChatWriter(tokenizer, table.label)
        empty = True
        read = table.rows.select_columns([*columns])
        for first in range(0, len(read), _ROWS):
            rows = read[first : first + _ROWS]
            cells = (content(writer(cell)) for column in columns for cell in rows[column])
            texts = [cell for cell in cells if isinstance(cell, str)]
            if texts:
                empty = False
                yield label, texts
        writer.close()
        if empty:
            raise DataError(
                f"all {len(table.rows)} rows of `{table.label}` are empty in the columns "
                + listed(columns),
                hint="name other columns in `calibration.columns`, or give other data",
            )
