"""Copies of model folders that Transformers reads as they are meant, where it would misread them.

What loads a model is `from_pretrained` on a folder, in many places and in libraries of others. So
what others wrote in another way is put right in a copy, which lives as long as the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from weakref import finalize

from tcompress.errors import SourceError
from tcompress.files import write_text
from tcompress.models.names import CARD, auxiliary_files, carry_files
from tcompress.models.store import WeightStore

_HELD = {".safetensors", ".bin", ".json"}


class Copy:
    """A folder of its own that goes when nobody holds it any more."""

    def __init__(self, name: str) -> None:
        home = TemporaryDirectory(prefix="tcompress-")
        finalize(self, home.cleanup)
        self.folder = Path(home.name) / (name or "model")  # as errors name it
        self.folder.mkdir()

    def take(self, folder: Path, *, weights: bool = False) -> None:
        """Copy what belongs to a model beside its config, and link to its weights."""
        card = [Path(CARD)] if (folder / CARD).is_file() else []
        carry_files(folder, (*auxiliary_files(folder, with_code=True), *card), self.folder)
        if not weights:
            return
        names = {path.name for path in folder.iterdir() if path.suffix in _HELD}
        names = {name for name in names if name.startswith(("model", "pytorch_model"))}
        for name in names | WeightStore.files_in(folder):  # shards may have any name
            if (folder / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).symlink_to((folder / name).resolve())

    def configure(self, settings: Mapping[str, Any]) -> None:
        write_text(self.folder / "config.json", json.dumps(settings, indent=2) + "\n")


@contextmanager
def copying(folder: Path) -> Iterator[Copy]:
    """Yield a copy to fill; an error of the disk says where it is."""
    try:
        yield Copy(folder.name)
    except OSError as error:
        text = f"`{folder}` needs a copy in `{gettempdir()}`, which fails ({error.strerror})"
        hint = "free some space there, or name another folder: `TMPDIR=FOLDER`"
        raise SourceError(text, hint) from error


def with_settings(folder: Path, settings: Mapping[str, Any]) -> Copy:
    """Make a copy of a folder with another `config.json`."""
    with copying(folder) as copy:
        copy.take(folder, weights=True)
        copy.configure(settings)
        return copy


def with_names(
    folder: Path, settings: Mapping[str, Any], store: WeightStore, names: Mapping[str, str]
) -> Copy:
    """Make a copy of a folder with tensors under other names, given by the stored ones."""
    with copying(folder) as copy:
        copy.take(folder)
        copy.configure(settings)
        where: dict[str, str] = {}
        for number, file in enumerate(store.files):
            held = {key: names[key] for key in names if store.file_of(key) == file}
            name = f"model-{number}.safetensors" if store.files[1:] else "model.safetensors"
            _write_renamed(store, folder / file, held, copy.folder / name)
            shutil.copystat(folder / file, copy.folder / name)  # the same again is as old
            where |= dict.fromkeys(held.values(), name)
        if store.files[1:]:
            text = json.dumps({"metadata": {}, "weight_map": where}, indent=2)
            write_text(copy.folder / "model.safetensors.index.json", text + "\n")
        return copy


def _write_renamed(store: WeightStore, path: Path, names: Mapping[str, str], target: Path) -> None:
    if path.suffix != ".safetensors":
        from safetensors.torch import save_file

        save_file({new: store.tensor(old) for old, new in names.items()}, target, {"format": "pt"})
        return
    with path.open("rb") as file, target.open("xb") as other:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        text = json.dumps({names.get(key, key): value for key, value in header.items()}).encode()
        text += b" " * (-len(text) % 8)
        other.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(file, other, 2**24)
