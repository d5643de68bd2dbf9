"""What README and the pages promise: commands and options exist, links lead somewhere."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import tcompress
from tcompress.cli.main import program
from tcompress.options import method_names, recipe_names, replacement_names
from tcompress.project import REPOSITORY
from tests.support.cli import commands

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [path.stem for path in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PROGRAMS = re.compile(r"(python|pytest|mkdocs|pip|ruff|torchrun|accelerate|benchmarks/)")
FOLDERS = tuple({f"{name.partition('/')[0]}/" for name in recipe_names()})


COMMANDS = {tuple(name.split()): command for name, command in commands()}
COMMANDS["recipes",] = typer.main.get_command(program()).commands["recipes"]  # a group of them


def options(command: Any) -> set[str]:
    return {name for item in command.params for name in (*item.opts, *item.secondary_opts)}


ALL_OPTIONS = {name for command in COMMANDS.values() for name in options(command)}


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", path.read_text("utf-8"))


def typed(text: str) -> Iterator[list[str]]:
    """Words of every command line for tcompress in some text."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.removeprefix("$ ").split(" && "):
            if part.startswith("tcompress "):
                yield shlex.split(part, comments=True)[1:]


def shown(path: Path) -> Iterator[list[str]]:
    """Words of every command line on a page, in blocks and in sentences."""
    text = path.read_text("utf-8")
    for language, body in FENCE.findall(text):
        if language in ("bash", "console"):
            yield from typed(body)
    for code in CODE.findall(prose(path)):
        if "..." not in code:
            yield from typed(code)


def found(words: list[str]) -> tuple[Any, list[str]]:
    """The command that some words name, and the words behind its name."""
    for length in (2, 1):
        if tuple(words[:length]) in COMMANDS:
            return COMMANDS[tuple(words[:length])], words[length:]
    raise AssertionError(f"there is no command `tcompress {' '.join(words)}`")


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_commands_exist_with_their_options(path: Path) -> None:
    for words in shown(path):
        command, rest = found(words)
        known = options(command)
        given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
        assert [name for name in given if name not in known] == [], words
        for option, value in pairwise(rest):
            if option == "--method":
                assert value in (*method_names(), *replacement_names()), words
        recipes = [word for word in rest if word.startswith(FOLDERS)]
        assert [name for name in recipes if name not in recipe_names()] == [], words


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_options_in_sentences_exist(path: Path) -> None:
    for code in CODE.findall(prose(path)):
        if not PROGRAMS.match(code):
            assert [name for name in FLAG.findall(code) if name not in ALL_OPTIONS] == [], code


def anchors(path: Path) -> set[str]:
    """Names of the headings of a page, as GitHub and MkDocs make them."""
    plain = [re.sub(r"[`*\[\]]", "", text) for text in HEADING.findall(prose(path))]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in plain}


def links(path: Path) -> Iterator[tuple[str, str]]:
    for target in LINK.findall(prose(path)):
        if not target.startswith(("https://", "http://")):
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path: Path) -> None:
    for file, anchor in links(path):
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), f"{path.name}: {file}"
        # MkDocs squeezes runs of dashes.
        text = target.suffix == ".md"
        names = {re.sub("-+", "-", name) for name in anchors(target)} if text else set()
        assert not anchor or re.sub("-+", "-", anchor) in names, f"{path.name}: {file}#{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"[\w-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_readme_is_short_and_has_its_test_command() -> None:
    text = README.read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 180
    assert next(n for n, line in enumerate(lines) if line.startswith("## ")) <= 60
    block = re.search(r"<!-- test command -->\n```bash\n(.+)\n```", text)
    assert "pytest" in block[1]


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_python_of_pages_is_valid_and_uses_what_there_is(path: Path) -> None:
    for language, body in FENCE.findall(path.read_text("utf-8")):
        if language == "python":
            compile(body, path.name, "exec")
            for name in re.findall(r"\btcompress\.(\w+)\(", body):
                assert name in tcompress.__all__, f"{path.name}: tcompress.{name}"


def test_programs_of_benchmarks_exist() -> None:
    for path in PAGES:
        for name in re.findall(r"python (benchmarks/\w+\.py)", path.read_text("utf-8")):
            assert (ROOT / name).is_file(), f"{path.name}: {name}"


def test_the_repository_is_named_in_one_file_and_no_package_index_anywhere() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert declared["project"]["urls"]["Repository"] == REPOSITORY
    code = {path.name: path.read_text("utf-8") for path in (ROOT / "tcompress").rglob("*.py")}
    assert [name for name, text in code.items() if REPOSITORY in text] == ["project.py"]
    # `names.py` keeps what configs of earlier versions hold.
    strayed = ("pypi.org", "pip install tcompress", "--upgrade tcompress", "install 'tcompress[")
    assert {name for name, text in code.items() if any(word in text for word in strayed)} <= {
        "names.py",
        "project.py",
    }
