"""Hundreds of damaged artefacts: each is one clear error, and none is used as if it were whole.

`from_pretrained` reads no checksums, so that some damages it cannot know of: bytes of values, files
that it does not read, and settings in `config.json` outside of the plan (`may_load`).
"""

from __future__ import annotations

import json
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import tcompress
from tcompress.errors import TCompressError
from tests.support.cli import run
from tests.support.conversions import OPTIONS, make
from tests.support.model_folders import nested_items, save_tokenizer
from tests.support.own_models import Workshop
from tests.support.scratch import LPROD, scratch

pytestmark = pytest.mark.fuzz

ROUNDS, CASES = 16, 42  # 672 damages
MEMORY = 3 * 2**30
PACKAGE = str(Path(tcompress.__file__).parent)
CONFIG, MANIFEST, CARD = "config.json", "tcompress.json", "README.md"
SWAPS: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**400, 2**62, 0.5, float("nan"), float("inf"), "", "x", "7", [], [1],
    {}, {"a": 1}, [[]], [None],
)  # fmt: skip


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One artefact of every structure and every kind of attention, several of them in shards."""
    root, made = tmp_path_factory.mktemp("artefacts"), {}
    for option in OPTIONS:
        size = "30KB" if option in ("svd", "fitted") else "2GB"
        save_tokenizer(root / option / "dense")
        made[option] = make("bert", root / option, option, max_shard_size=size).folder
    made["experts"] = make("mixtral", root / "experts", "svd").folder
    embeddings = {"embeddings": {"method": {"name": "svd"}, "target": 0.5}, "method": None}
    made["embeddings"] = make("gpt2", root / "embeddings", **embeddings, target=None).folder
    for family, name in (
        ("bert", "folded"), ("vit", "hot"), ("gpt2", "tga"), ("llama", "tsa"),
        ("bert", "tam"), ("bert", "memory"), ("bert", "tucker"), ("bert", "multilinear"),
    ):  # fmt: skip
        made[name] = Workshop(root / name).hosted(family, name).folder
    forms = {"positions": "harmonic", "norm": "tensor"}
    made["scratch"] = scratch(root / "scratch", method=LPROD, **forms).folder
    return made


def weights_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def flip(folder: Path, random: Random, others: list[Path]) -> None:
    path = random.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content))
    content[place] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def cut(folder: Path, random: Random, others: list[Path]) -> None:
    path = random.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    content = path.read_bytes()
    path.write_bytes(content[: random.choice([0, random.randrange(len(content))])])


def lose(folder: Path, random: Random, others: list[Path]) -> None:
    path = random.choice(sorted(folder.iterdir()))
    path.unlink()


def tensors(folder: Path, random: Random, others: list[Path]) -> None:
    path = random.choice(weights_of(folder))
    held = load_file(path)
    name = random.choice(sorted(held))
    kind = random.choice(["remove", "rename", "swap", "shape", "dtype"])
    if kind == "remove":
        del held[name]
    elif kind == "rename":
        held[f"{name}x"] = held.pop(name)
    elif kind == "shape":
        held[name] = held[name].repeat(2, *[1] * (held[name].ndim - 1))
    elif kind == "dtype":
        held[name] = held[name].double()
    else:
        alike = [key for key in held if key != name and held[key].shape == held[name].shape]
        other = random.choice(sorted(alike) or [name])
        held[name], held[other] = held[other] + 1, held[name]
    save_file(held, path, {"format": "pt"})


def header(folder: Path, random: Random, others: list[Path]) -> None:
    path = random.choice(weights_of(folder))
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    text = edited(entries, random).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def index(folder: Path, random: Random, others: list[Path]) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        settings(folder, random, others)
        return
    path.write_text(edited(json.loads(path.read_text()), random))


def settings(folder: Path, random: Random, others: list[Path]) -> None:
    path = folder / CONFIG
    path.write_text(edited(json.loads(path.read_text()), random))


def plan(folder: Path, random: Random, others: list[Path]) -> None:
    path = folder / CONFIG
    config = json.loads(path.read_text())
    section = config["quantization_config"]
    config["quantization_config"] = "@"
    path.write_text(json.dumps(config).replace('"@"', edited(section, random)))


def manifest(folder: Path, random: Random, others: list[Path]) -> None:
    path = folder / MANIFEST
    path.write_text(edited(json.loads(path.read_text()), random))


def exchange(folder: Path, random: Random, others: list[Path]) -> None:
    other = random.choice(others)
    names = {path.name for path in other.iterdir()} & {path.name for path in folder.iterdir()}
    differ = [n for n in sorted(names) if (other / n).read_bytes() != (folder / n).read_bytes()]
    name = random.choice(differ)
    shutil.copyfile(other / name, folder / name)


def unsealed(folder: Path, random: Random, others: list[Path]) -> None:
    """The plan of an artefact without manifest and digest, as older ones are when saved again."""
    (folder / MANIFEST).unlink()
    path = folder / CONFIG
    config = json.loads(path.read_text())
    section = config["quantization_config"]
    del section["digest"]
    config["quantization_config"] = {**section, "plan": "@"}
    path.write_text(json.dumps(config).replace('"@"', edited(section["plan"], random)))


DAMAGES: tuple[Callable[[Path, Random, list[Path]], None], ...] = (
    flip, cut, lose, tensors, tensors, header, index, settings, plan, plan, manifest, exchange,
    unsealed, unsealed,
)  # fmt: skip


def edited(document: Any, random: Random) -> str:
    """The JSON text with one value that is another, twice there, gone, or too deep."""
    before = json.dumps(document, sort_keys=True)
    while True:
        changed = json.loads(json.dumps(document))
        owner, key = random.choice(list(nested_items(changed)))
        kind = random.choice(["swap", "swap", "swap", "number", "lose", "rename", "deep", "twice"])
        if kind == "lose":
            del owner[key]
        elif kind == "rename" and isinstance(owner, dict):
            owner[f"{key}_"] = owner.pop(key)
        elif kind == "number" and isinstance(owner[key], int | float):
            owner[key] = owner[key] * random.choice([2, -1, 10**6]) + random.choice([0, 1])
        elif kind == "deep":
            owner[key] = "@deep"
        elif kind == "twice" and isinstance(owner, dict):
            owner["@twice"] = [key, owner[key], random.choice(SWAPS)]
        else:
            owner[key] = random.choice(SWAPS)
        text = json.dumps(changed)
        if json.dumps(changed, sort_keys=True) != before:
            break
    deep = random.choice([150, 5000])
    text = text.replace('"@deep"', "[" * deep + "]" * deep)
    if kind == "twice" and '"@twice": ' in text:
        head, _, tail = text.partition('"@twice": ')
        (name, value, other), end = json.JSONDecoder().raw_decode(tail)
        twice = f"{json.dumps(name)}: {json.dumps(value)}, {json.dumps(name)}: {json.dumps(other)}"
        text = f"{head}{twice}{tail[end:]}"
    return text


def ours(error: BaseException) -> bool:
    """Whether a foreign exception was raised by our code, or by what it called directly."""
    if isinstance(error, TCompressError):
        return False
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.startswith(PACKAGE) for file in frames[-3:])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def may_load(before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether a damage is one that `from_pretrained` does not look for."""
    if after.get(MANIFEST, before[MANIFEST]) != before[MANIFEST]:
        return False
    if {name for name in before if name not in after} & {CONFIG, *weights_in(before)}:
        return False
    try:
        sections = [json.loads(files[CONFIG])["quantization_config"] for files in (before, after)]
        for section in sections:  # words for people
            section.pop("note", None)
            section.pop("note_", None)
        headers = [
            {name: item["shape"] for file in weights_in(files) for name, item in head(files[file])}
            for files in (before, after)
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return sections[0] == sections[1] and headers[0] == headers[1]


def weights_in(files: dict[str, bytes]) -> list[str]:
    return [name for name in files if name.endswith(".safetensors")]


def head(content: bytes) -> list[tuple[str, Any]]:
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [(name, item) for name, item in entries.items() if name != "__metadata__"]


def check(folder: Path, before: dict[str, bytes]) -> Iterator[str]:
    """Yields what went wrong with a damaged artefact."""
    after = contents(folder)
    changed = {name for name in before if before[name] != after.get(name)}
    sealed = MANIFEST in after
    for command in (["inspect", folder, "--verify"], ["report", folder], ["inspect", folder]):
        done = run(*command)
        harmless = "--verify" not in command and (changed <= {CARD} or not sealed)
        harmless |= changed == {CARD} and CARD not in after  # not all downloads bring it
        if done.code == 0 and not harmless and command != ["inspect", folder]:
            yield f"{command[0]} found nothing"
        clear = done.err.startswith("error: ") and "unexpected" not in done.err
        if done.code not in (0, 2) or (done.code == 2 and not clear):
            yield f"{command[0]}: exit {done.code}: {done.err[-1500:]}"
    try:
        AutoModel.from_pretrained(folder)
    except Exception as error:
        if ours(error):
            lines = traceback.format_exception(error)
            yield f"from_pretrained: {''.join(lines)[-1500:]}"
    else:
        if "digest" in json.loads(after[CONFIG]).get("quantization_config", {}) and not may_load(
            before, after
        ):
            yield "from_pretrained loaded it"


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Transformers makes room for whatever sizes a config says before it compares them."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_damages_are_found(seed: int, artefacts: dict[str, Path], tmp_path: Path) -> None:
    random, failures = Random(seed), []
    names = sorted(artefacts)
    for case in range(CASES):
        name = names[(seed * CASES + case) % len(names)]
        damage = DAMAGES[(seed + case) % len(DAMAGES)]
        folder = tmp_path / f"{case}-{name}"
        shutil.copytree(artefacts[name], folder)
        before = contents(folder)
        damage(folder, random, [path for path in artefacts.values() if path != artefacts[name]])
        if damage is unsealed:
            before = {MANIFEST: before[MANIFEST], **contents(folder)}
        failures += [
            f"{name}, {damage.__name__} (seed {seed}, case {case}): {problem}"
            for problem in check(folder, before)
        ]
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)
