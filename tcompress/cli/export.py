"""`tcompress export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tcompress.artifact.checksums import check_converted
from tcompress.artifact.workplace import check_output
from tcompress.cli.first_look import first_look, reach
from tcompress.cli.terminal import print_json, say, shown_progress, tell
from tcompress.errors import InputError
from tcompress.models.names import default_output_name
from tcompress.options.commands import Exported, Hub, Manner, OnnxFiles, Written
from tcompress.runtimes.installed import require

EXAMPLES = (
    "tcompress export minilm-svd --to onnx --int8 -o minilm-onnx",
    "tcompress export bert-base-lprod-p4 --to dense -o bert-base-plain",
)


def export(call: Exported, files: OnnxFiles, written: Written, hub: Hub, manner: Manner) -> None:
    """Does what `tcompress export` says."""
    model, to = Path(call.model), call.to
    folder = Path(written.output or default_output_name(call.model, to)).expanduser()
    if to == "dense":
        _to_dense(model, folder, files, written, manner)
        return
    output, local = folder.absolute(), model.expanduser()
    inside = output.is_dir() and local.is_dir() and output.samefile(local)
    with first_look() as look:
        look.check(require, to)
        look.check(files.refuse_bits, to)
        look.models(call.model)
        look.check(check_output, output, force=written.force or inside)
    reach(call.model, token=hub.token)
    from tcompress.exports.onnx_folder import export_onnx

    with shown_progress(quiet=manner.quiet) as progress:
        exported = export_onnx(
            call.model,
            folder,
            files,
            to=to,
            force=written.force,
            token=hub.token,
            trust_remote_code=hub.allow_remote_code,
            progress=progress,
        )
    if manner.as_json:
        rows = [item.model_dump(mode="json") for item in exported.files]
        found = {"output": str(exported.folder), "format": to, "files": rows}
        print_json({**found, "notes": list(exported.notes)})
        return
    for item in exported.files:
        _tell_file(item)
    for note in exported.notes:
        say(f"note: {note}", quiet=manner.quiet)
    tell(f"Wrote `{folder}`; see docs/deploy.md for how it is opened.")


def _to_dense(
    model: Path, folder: Path, files: OnnxFiles, written: Written, manner: Manner
) -> None:
    with first_look() as look:
        look.check(_refuse_options, files)
        look.check(check_output, folder.absolute(), force=written.force)
        look.check(check_converted, model.expanduser())
    from tcompress.exports.dense import export_dense
    from tcompress.models.names import read_config, stands_alone

    with shown_progress(quiet=manner.quiet) as progress:
        exported = export_dense(model, folder, force=written.force, progress=progress)
    if manner.as_json:
        print_json({"output": str(exported), "format": "dense"})
    else:
        alone = stands_alone(read_config(exported))
        needs = "without tcompress" if alone else "with `import tcompress`"
        tell(f"Wrote `{folder}`, which loads {needs}.")


def _refuse_options(files: OnnxFiles) -> None:
    if options := files.model_dump(exclude_defaults=True):
        names = ", ".join(f"`--{name.replace('_', '-')}`" for name in options)
        raise InputError(f"{names} can only be given for ONNX files", "add `--to onnx`")


def _tell_file(item: Any) -> None:
    tell(
        f"{item.file}: {item.bytes / 1e6:.1f} MB; {item.ratio:.2f} x as fast as PyTorch at "
        f"{item.size}; cosine of outputs {item.agreement:.4f}, "
        f"largest difference {item.difference:.2g}"
    )
    if item.left:
        shown = ", ".join(f"`{name}`" for name in item.left[:3])
        more = f" and {len(item.left) - 3} more" if len(item.left) > 3 else ""
        tell(f"  in float32: {shown}{more}")
