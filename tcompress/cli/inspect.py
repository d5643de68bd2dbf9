"""`tcompress inspect`."""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tcompress.cli.first_look import first_look, reach
from tcompress.cli.terminal import print_json, results, table, tell
from tcompress.options.commands import Access, Inspected, Manner
from tcompress.options.words import quoted
from tcompress.reporting.formatting import grouped, reason_table, stages_text

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.inspection import Inspection

EXAMPLES = (
    "tcompress inspect bert-base",
    "tcompress inspect ./bert-base-lprod-p4 --layers",
    "tcompress inspect ./bert-base-lprod-p4 --verify",
    "tcompress inspect gpt2 --json",
)


def inspect(call: Inspected, access: Access, manner: Manner) -> None:
    """Does what `tcompress inspect` says."""
    if call.verify:
        _verify(call.model, access, manner)
        return
    bare = Path(call.model).name == "config.json"  # what has no weights yet
    with first_look() as look:
        look.models(call.model, revision=access.revision, weights=not bare)
    reach(call.model, revision=access.revision, token=access.token, weights=not bare)
    from tcompress.inspection import inspect_model

    found = inspect_model(
        call.model, access.revision, access.token, access.allow_remote_code, plan=call.plan
    )
    if manner.as_json:
        print_json(found.model_dump(mode="json"))
        return
    state = "converted" if found.converted else "dense"
    tell(
        f"{found.model}: {found.model_class} (`{found.family}`), {state}, "
        f"{len(found.blocks)} blocks, {found.parameters:,} parameters"
    )
    if found.attention:
        tell(f"attention: {found.attention}")
    if found.storage:
        tell(f"stored in {found.storage}")
    if found.vocabulary:
        tell(f"vocabulary: {found.vocabulary}")
    if times := stages_text(found.stage_seconds):
        tell(f"converted in {times}")
    for warning in found.warnings:
        tell(f"warning: {warning}", style="yellow")
    results().print(_layer_table(found, each=call.layers))
    if found.refused:
        results().print(reason_table("stays dense", found.refused))


def _verify(model: str, access: Access, manner: Manner) -> None:
    from tcompress.models import resolve

    folder = resolve(model, access.revision, access.token)
    from tcompress.artifact.reader import verify_files

    found = verify_files(folder)
    if manner.as_json:
        print_json({"model": model, **asdict(found)})
        return
    tell(f"{model}: {found.files} files of {found.bytes:,} bytes are as they were written")
    if found.others:
        more = f" and {len(found.others) - 8} more" if len(found.others) > 8 else ""
        tell(f"no checksums of {quoted(found.others[:8])}{more}")


def _layer_table(found: Inspection, *, each: bool) -> Table:
    alike = ("role", "kind", "parts", "structure", "in_features", "out_features", "experts")
    groups = grouped(found.layers, attrgetter(*(["name"] if each else alike)))
    names = ["role", "stored as", "in", "out", "layers", "such as"]
    rows = table(*names, *(["structure"] if found.converted else []), right=names[2:5])
    for first, *others in groups.values():
        role = f"{first.role} ({'+'.join(first.parts)})" if first.parts else first.role
        kind = f"{first.experts} experts" if first.experts else first.kind
        counts = (first.in_features, first.out_features, 1 + len(others))
        rows.add_row(role, kind, *map(str, counts), first.name, first.structure)
    return rows
