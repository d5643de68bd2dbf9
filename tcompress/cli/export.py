"""`tcompress export`."""

from __future__ import annotations

import json
from pathlib import Path

from tcompress.artifact.checksums import check_converted
from tcompress.artifact.workplace import check_output
from tcompress.cli.first_look import first_look, reach
from tcompress.cli.terminal import print_json, shown_progress, tell
from tcompress.options.commands import Exported, Hub, Manner, OnnxFiles, Written

EXAMPLES = (
    "tcompress export bert-base-lprod-p4 --to dense -o bert-base-plain",
    "tcompress export minilm-svd --to onnx --int8",
)


def export(call: Exported, files: OnnxFiles, written: Written, hub: Hub, manner: Manner) -> None:
    """Does what `tcompress export` says."""
    model = Path(call.model)
    folder = Path(written.output or f"{model.name or model.resolve().name}-{call.to}")
    if call.to == "onnx":
        _onnx(call.model, folder, files, written, hub, manner)
        return
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


def _onnx(
    model: str, folder: Path, files: OnnxFiles, written: Written, hub: Hub, manner: Manner
) -> None:
    with first_look() as look:
        look.models(model)
    reach(model, token=hub.token)
    from tcompress.exports.onnx_folder import export_onnx

    with shown_progress(quiet=manner.quiet) as progress:
        exported = export_onnx(
            model,
            folder,
            files,
            force=written.force,
            token=hub.token,
            trust_remote_code=hub.allow_remote_code,
            progress=progress,
        )
    if manner.as_json:
        rows = [item.model_dump(mode="json") for item in exported.files]
        print_json({"output": str(exported.folder), "format": "onnx", "files": rows})
        return
    for item in exported.files:
        tell(
            f"{item.file}: {item.bytes / 1e6:.1f} MB, {item.ratio:.2f} x as fast as PyTorch, largest "
            f"difference {item.difference:.2g}, agreement {item.agreement:.4f}"
        )
    tell(f"Wrote `{folder}`.")
