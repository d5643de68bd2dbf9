"""What a command is given, looked at before torch is imported: a mistyped path is told at once.

Checks say nothing: each is the one that the work itself makes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcompress.artifact.workplace import SWEEP, check_apart, check_output, check_sweep
from tcompress.cli import terminal
from tcompress.errors import InputError, Problems
from tcompress.files import check_drawings, check_latex, check_page, check_sheet
from tcompress.models.adapters import Adapter, check_adapter
from tcompress.models.names import (
    ALIASES,
    MANIFEST,
    find_locally,
    local_folder,
    read_config,
    resolve,
)
from tcompress.options.commands import Access, Manner, Tables
from tcompress.options.convert_options import Convert
from tcompress.options.schema import Recipe, data_of, kept_beside
from tcompress.options.steps import Architecture, Finetune

if TYPE_CHECKING:
    from tcompress.models import SourceModel


@contextmanager
def first_look() -> Iterator[Look]:
    """Yield a collector of checks, and report all problems at the end of the block."""
    look = Look()
    yield look
    look.report()


class Look(Problems):
    """Checks of one command, and what is wrong so far."""

    def check(self, check: Callable[..., None], *what: Any, **how: Any) -> None:
        """Makes a check of any kind, which may raise an `InputError`."""
        with self.collected():
            check(*what, **how)

    def models(
        self,
        *names: str | None,
        revision: str | None = None,
        weights: bool = True,
        adapter: Adapter | None = None,
    ) -> None:
        """Refuses what can only be meant as a path and is no folder of a model.

        Without `weights` the path of a `config.json` is enough.
        """
        for name in filter(None, dict.fromkeys(names)):
            with self.collected():
                folder = find_locally(name, revision, weights=weights)
                if folder is not None and weights:
                    check_adapter(folder, adapter)
                merged = weights and adapter is not None  # it may be alone
                if folder is not None and not merged and not (folder / MANIFEST).is_file():
                    read_config(folder)  # what else is missing beside it, a manifest says

    def output(self, output: Path, model: str, *, force: bool) -> None:
        """Refuses an output that cannot be written, or is the folder of the model."""
        if (local := local_folder(model)) is not None:
            self.check(check_apart, output, local, "the model's own folder")
        if not self.found:  # nor has it anything to say of such a folder
            self.check(check_output, output, force=force)

    def data(self, names: Iterable[str]) -> None:
        """Refuses files and folders of data that are not there."""
        from tcompress.data.tables import check_data  # which takes numpy: not for help

        self.check(check_data, names)

    def page(self, path: str | None) -> None:
        """Refuses a page that cannot be written, if one is asked for."""
        if path is not None:
            self.check(check_page, Path(path).expanduser())

    def tables(self, tables: Tables, html: str | None = None, figures: str | None = None) -> None:
        """Refuses files of tables, a page and drawings that cannot be written, or are one file."""
        given: dict[str, tuple[str | None, Callable[[Path], None]]] = {
            "--html": (html, check_page),
            "--csv": (tables.csv, check_sheet),
            "--latex": (tables.latex, check_latex),
            "--figures": (figures, check_drawings),
        }
        names: dict[Path, list[str]] = {}
        for flag, (path, check) in given.items():
            if path is not None:
                target = Path(path).expanduser()
                names.setdefault(target.absolute(), []).append(flag)
                self.check(check, target)
        for target, flags in names.items():
            if len(flags) > 1:
                text = f"{' and '.join(f'`{flag}`' for flag in flags)} name one file, `{target}`"
                self.found.append(InputError(text, "give each a name of its own"))

    def recipe(self, recipe: Recipe, output: Path, *, force: bool) -> None:
        """Looks at what the stages of a recipe read and write; what is made may be used again."""
        made = {output, output if recipe.finetune is None else kept_beside(output, "converted")}
        made |= set() if recipe.pretrain is None else {kept_beside(output, "pretrained")}
        fresh = not any((folder / MANIFEST).is_file() for folder in made)
        self.page(recipe.report)
        if not fresh and not force:  # which stages are still to be done, weights tell
            return
        self.data(data_of(recipe))
        for folder in sorted(made):
            self.check(check_output, folder, force=force)
        self.teacher(recipe.pretrain)
        self.teacher(recipe.finetune)

    def sweep(self, recipe: Recipe, output: Path, *, force: bool) -> None:
        """Looks at what the cells of a sweep read and write; those that are done read nothing."""
        self.check(check_sweep, output, force=force)
        self.page(recipe.report)
        if force or not (output / SWEEP).is_dir():
            self.data(data_of(recipe))
            self.teacher(recipe.finetune)

    def teacher(self, training: Finetune | None) -> None:
        """Refuses teachers that are no folder of a model."""
        for name in training.teacher if training is not None else ():
            if name not in ("source", "none"):
                self.models(name)


def reach(
    *names: str | None,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
) -> None:
    """Asks the hub for models that are not here; its client is imported sooner than torch."""
    problems = Problems()
    for name in filter(None, dict.fromkeys(names)):
        with problems.collected():
            resolve(name, revision, token, weights=weights)
    problems.report()


@dataclass(frozen=True)
class Job:
    """One conversion, or a sweep over some, as it was asked for.

    `architecture` is a recipe's, in place of a model.
    """

    model: str
    convert: Convert
    output: Path
    force: bool
    access: Access
    manner: Manner
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()  # what is taken unasked, said before it begins

    def look_at_model(self, look: Look) -> None:
        """Refuses a model that can only be meant as a path, and leads nowhere."""
        if self.architecture is None:
            weights = self.convert.init != "random"
            adapter = self.convert.adapter
            look.models(self.model, revision=self.access.revision, weights=weights, adapter=adapter)
        elif isinstance(self.architecture.tokenizer, str):
            look.models(self.architecture.tokenizer, weights=False)

    def open(self) -> SourceModel:
        """Opens the dense model, once it is said what nobody asked for."""
        for note in self.notes:
            terminal.say(note, quiet=self.manner.quiet)
        name, access = self.model, self.access
        if self.architecture is not None:
            from tcompress.own_models.architecture import open_architecture

            return open_architecture(self.architecture, self.convert.seed, access.token)
        if name in ALIASES and local_folder(name) is None:
            terminal.say(f"`{name}` is `{ALIASES[name]}`", quiet=self.manner.quiet)
        seed = self.convert.seed if self.convert.init == "random" else None
        resolve(name, access.revision, access.token, weights=seed is None)  # before a long import
        from tcompress.models import SourceModel

        return SourceModel.open(
            name,
            revision=access.revision,
            token=access.token,
            trust_remote_code=access.allow_remote_code,
            seed=seed,
            adapter=self.convert.adapter,
        )
