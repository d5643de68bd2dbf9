"""Recipes that ship with tcompress. Cheap to import: shell completion asks for the names."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from tcompress.errors import InputError, RecipeError
from tcompress.files import check_file, unwritable, write_text
from tcompress.options.words import quoted, suggestion

_SUFFIX = ".yaml"
RECIPE_FILES = (_SUFFIX, ".yml", ".json")


def recipe_names() -> tuple[str, ...]:
    """Returns the names of the recipes that ship, such as `encoder/minilm-lprod`."""
    return tuple(sorted(_shipped()))


def recipe_text(name: str) -> str:
    """Returns the text of a recipe that ships; `RecipeError` lists those there are."""
    shipped, name = _shipped(), name.removesuffix(_SUFFIX)
    if name in shipped:
        return shipped[name].read_text("utf-8")
    ends = {short.rpartition("/")[2]: short for short in shipped} | {full: full for full in shipped}
    close = dict.fromkeys(ends[word] for word in difflib.get_close_matches(name, ends, 6, 0.5))
    near = " or ".join(f"`{word}`" for word in list(close)[:3])
    hint = f"did you mean {near}?" if near else "give one of these, or a file that ends in `.yaml`"
    text = f"there is no recipe `{name}`; recipes that ship are {quoted(sorted(shipped))}"
    raise RecipeError(text, hint)


def find_recipe(name_or_path: str | Path) -> tuple[str, str]:
    """Find a recipe's text and where it is from; a file wins over a recipe that ships."""
    name_or_path = str(name_or_path)
    name = name_or_path.removesuffix(_SUFFIX)
    path = Path(name_or_path).expanduser()
    if not path.is_file() and name in _shipped():
        return recipe_text(name), name + _SUFFIX
    is_path = name_or_path.endswith(RECIPE_FILES) or name_or_path.startswith((".", "/", "~"))
    if path.exists() or is_path:  # so that an error is about the path
        return read_text(name_or_path), name_or_path
    return recipe_text(name), name + _SUFFIX


def copy_recipe(name: str, target: str | Path, force: bool = False) -> Path:
    """Copies a recipe that ships to a file, or into a folder, and returns the file."""
    text = recipe_text(name)
    path = Path(target).expanduser()
    try:
        if path.is_dir():
            path /= name.removesuffix(_SUFFIX).rpartition("/")[2] + _SUFFIX
        if path.exists() and not force:
            hint = "give another file, or overwrite: `--force`"
            raise RecipeError(f"`{path}` already exists", hint)
        path.parent.mkdir(parents=True, exist_ok=True)
        check_file(path)
        write_text(path, text)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error
    return path


def read_text(path: str | Path) -> str:
    """Reads a recipe file."""
    file = Path(path).expanduser()
    try:
        return file.read_text("utf-8-sig")
    except FileNotFoundError as error:
        folder = next((item for item in file.absolute().parents if item.is_dir()), Path("/"))
        names = [item.name for item in _recipe_files(folder)]
        hint = suggestion(file.name, names, "see `tcompress recipes list`")
        raise RecipeError(f"there is no file `{path}`; {_content(folder)}", hint) from error
    except IsADirectoryError as error:
        raise RecipeError(f"`{path}` is a folder; {_content(file)}", "give a file") from error
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8"
        raise RecipeError(f"`{path}` is not UTF-8 text, at byte {error.start}", hint) from error
    except OSError as error:
        raise RecipeError(f"`{path}` cannot be read: {error.strerror}") from error


def _shipped() -> dict[str, Path]:
    """Finds the recipes: inside the package once installed, beside it in a checkout."""
    package = Path(str(files("tcompress")))
    folder = package / "assets" / "recipes"
    folder = folder if folder.is_dir() else package.parent / "recipes"
    found = folder.rglob(f"*{_SUFFIX}")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in found}


def _content(folder: Path) -> str:
    names = [item.name for item in _recipe_files(folder)[:12]]
    return f"`{folder}` holds {quoted(names) or 'no recipes'}"


def _recipe_files(folder: Path) -> list[Path]:
    try:
        return sorted(item for item in folder.iterdir() if item.name.endswith(RECIPE_FILES))
    except OSError:
        return []
