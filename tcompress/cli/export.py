"""`tcompress export`."""

from __future__ import annotations

import json
from pathlib import Path

from tcompress.artifact.checksums import check_converted
from tcompress.artifact.workplace import check_output
from tcompress.cli.first_look import first_look
from tcompress.cli.terminal import print_json, shown_progress, tell
from tcompress.options.commands import Exported, Manner, Written

EXAMPLES = ("tcompress export bert-base-lprod-p4 --to dense -o bert-base-plain",)


def export(call: Exported, written: Written, manner: Manner) -> None:
    """Does what `tcompress export` says."""
    model = Path(call.model)
    folder = Path(written.output or f"{model.name or model.resolve().name}-{call.to}")
    with first_look() as look:
        look.check(check_output, folder.expanduser().absolute(), force=written.force)
        look.check(check_converted, model.expanduser())
    from tcompress.exports.dense import export_dense
    from tcompress.models.names import stands_alone

    with shown_progress(quiet=manner.quiet) as progress:
        made = export_dense(model, folder, force=written.force, progress=progress)
    if manner.as_json:
        print_json({"output": str(made), "format": call.to})
    else:
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        needs = "without tcompress" if stands_alone(config) else "with `import tcompress`"
        tell(f"Wrote `{folder}`, which loads {needs}.")
