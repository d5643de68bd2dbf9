"""`tcompress inspect`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer

from tcompress.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.inspection import Inspection, LayerFacts

EPILOG = opt.examples(
    "tcompress inspect bert-base",
    "tcompress inspect ./bert-base-lprod-p4 --layers",
    "tcompress inspect gpt2 --json",
)


def inspect(
    model: opt.Model,
    layers: Annotated[
        bool, typer.Option("--layers", help="List every layer, not one row for equal ones.")
    ] = False,
    revision: opt.Revision = None,
    token: opt.Token = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show the blocks and layers of a model, and what cannot be rewritten."""
    from tcompress.cli.output import print_json, results, silence_libraries

    silence_libraries(verbose=verbose)
    from tcompress.inspection import inspect_model

    found = inspect_model(model, revision, token, allow_remote_code)
    if json:
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
    screen.print(_layer_table(found, each=layers))
    if found.refused:
        screen.print(_refused_table(found))


def _layer_table(found: Inspection, *, each: bool) -> Table:
    from tcompress.cli.output import table

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
    from tcompress.cli.output import table

    reasons: dict[str, list[str]] = defaultdict(list)
    for item in found.refused:
        reasons[item.reason].append(item.name)
    rows = table("stays dense", "such as", "because", right=["stays dense"])
    for reason, names in reasons.items():
        rows.add_row(str(len(names)), names[0], reason)
    return rows
