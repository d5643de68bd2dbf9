"""`tcompress inspect`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tcompress.options.commands import Access, Inspected, Manner

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.inspection import Inspection, LayerFacts

EXAMPLES = (
    "tcompress inspect bert-base",
    "tcompress inspect ./bert-base-lprod-p4 --layers",
    "tcompress inspect ./bert-base-lprod-p4 --verify",
    "tcompress inspect gpt2 --json",
)


def inspect(call: Inspected, access: Access, manner: Manner) -> None:
    """Does what `tcompress inspect` says."""
    from tcompress.cli.terminal import print_json, results, silence_libraries

    silence_libraries(verbose=manner.verbose)
    if call.verify:
        _verify(call.model, access.revision, access.token, as_json=manner.as_json)
        return
    from tcompress.inspection import inspect_model

    found = inspect_model(
        call.model, access.revision, access.token, access.allow_remote_code, plan=call.plan
    )
    if manner.as_json:
        print_json(found.model_dump(mode="json"))
        return
    screen = results()
    state = "converted" if found.converted else "dense"
    screen.print(
        f"{found.model}: {found.model_class} (`{found.family}`), {state}, "
        f"{len(found.blocks)} blocks, {found.parameters:,} parameters",
        soft_wrap=True,
    )
    if found.attention:
        screen.print(f"attention: {found.attention}")
    for warning in found.warnings:
        screen.print(f"warning: {warning}", soft_wrap=True, style="yellow")
    screen.print(_layer_table(found, each=call.layers))
    if found.refused:
        screen.print(_refused_table(found))


def _verify(model: str, revision: str | None, token: str | None, *, as_json: bool) -> None:
    from dataclasses import asdict

    from tcompress.artifact.reader import verify_files
    from tcompress.cli.terminal import print_json, results
    from tcompress.models import resolve

    found = verify_files(resolve(model, revision, token))
    if as_json:
        print_json({"model": model, **asdict(found)})
        return
    screen = results()
    screen.print(f"{model}: {found.files} files of {found.bytes:,} bytes are as they were written")
    if found.others:
        names = ", ".join(f"`{name}`" for name in found.others[:8])
        more = f" and {len(found.others) - 8} more" if len(found.others) > 8 else ""
        screen.print(f"no checksums of {names}{more}", soft_wrap=True)


def _layer_table(found: Inspection, *, each: bool) -> Table:
    from tcompress.cli.terminal import table

    groups: dict[object, list[LayerFacts]] = defaultdict(list)
    for layer in found.layers:
        groups[layer.name if each else _shape(layer)].append(layer)
    names = ["role", "stored as", "in", "out", "layers", "such as"]
    rows = table(*names, *(["structure"] if found.converted else []), right=names[2:5])
    for same in groups.values():
        first = same[0]
        cells = [_role(first), _kind(first), str(first.in_features), str(first.out_features)]
        rows.add_row(*cells, str(len(same)), first.name, first.structure)
    return rows


def _shape(layer: LayerFacts) -> tuple[object, ...]:
    sizes = (layer.in_features, layer.out_features, layer.experts)
    return (layer.role, layer.kind, layer.parts, layer.structure, *sizes)


def _role(layer: LayerFacts) -> str:
    return f"{layer.role} ({'+'.join(layer.parts)})" if layer.parts else layer.role


def _kind(layer: LayerFacts) -> str:
    return f"{layer.experts} experts" if layer.experts else layer.kind


def _refused_table(found: Inspection) -> Table:
    from tcompress.cli.terminal import table

    reasons: dict[str, list[str]] = defaultdict(list)
    for item in found.refused:
        reasons[item.reason].append(item.name)
    rows = table("stays dense", "such as", "because", right=["stays dense"])
    for reason, names in reasons.items():
        rows.add_row(str(len(names)), names[0], reason)
    return rows
