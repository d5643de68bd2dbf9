"""What is said of wrong command lines and recipes: one transcript with exit codes.

Commands are lines of `wrong_commands.txt`, as they are typed after `tcompress`. None of them writes
anything. What depends on the machine, such as a library that is missing, has tests elsewhere.
"""

import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.cli import run
from tests.support.evaluation import classifier, headed, labelled_file, pairs_file, rows_file
from tests.support.golden import Golden
from tests.support.model_folders import model_folder, sentences, text_file
from tests.support.training import small, small_encoder

COMMANDS = Path(__file__).with_name("wrong_commands.txt").read_text("utf-8").splitlines()
SVD = "recipe_version: 1\nconvert: {method: {name: svd, rank: 2}}\n"
VARIANTS = """\
recipe_version: 1
output: made
convert: {method: svd, target: 0.5}
evaluate:
  - {task: classification, data: test.csv}
variants:
  smoke: {evaluate.0.limit: 10, convert.target: 0.25}
  wrong: {evaluate.1.limit: 10}
  senseless: {convert.target: high}
"""
SEVERAL = [
    """\
recipe_version: 1
name: 3
convert:
  method:
    name: lprod
    p: 0
    transfrom: dct
  target: 1.5
  layers:
    - match: "*.q"
      method: {name: svd, rank: -1}
      keep: yes
""",
    "convrt: 1\nname: a\nname: b\n",
    """\
recipe_version: 1
convert:
  method: {name: svd, rank: 3}
  target: 0.5
  drop_layers: auto
  attention_layers: [1]
  norm: tensor
  calibration: {source: none}
  layers: [{match: q, method: {name: svd, tol: 0.1}}]
""",
    """\
recipe_version: 1
model: minilm
architecture: {model_typ: bert, tokenizer: {words: builtin, size: 5}}
convert: {init: random, method: {name: auto}, max_error: 0.1, positions: round}
sweep: {}
paper: [{row: Std, metric: accuracy, value: high}]
""",
    "recipe_version: 1\narchitecture: {model_type: bert}\nconvert: {method: {name: lprod, p: 4}}\n",
    """\
recipe_version: 1
convert: {method: {name: svd, rank: 3}, layers: [{match: q, target: 0.5}]}
""",
    """\
recipe_version: 1
convert: {init: random, method: auto, max_error: 0.1, drop_layers: 1, calibration: {source: a}}
""",
]
METHODS = """
name: svd, rnak: 3
name: svd, zzz: 3
name: svd, 1: 3
name: lpord
name: 7

nam: svd
name: svd, rank: '4'
name: svd, rank: 2.5
name: svd, rank: true
name: svd, rank: 3, rank: 4
name: svd, rank: 0, rank: 4
name: lprod, stages: 9
name: lprod, p:
name: lprod, placement: inn
name: lprod, transform: ''
name: tt, modes: {768: [24, 0]}
name: qtt, order: 3
name: qtt, modes: {16: [4, 4]}
name: tucker, share: none, cores: 3
name: tucker, share: none, rank: [3, 4]
name: svd, tol: 0.1, rank: 3
name: tucker, tol: 0.1
"""
CONVERSIONS = """
target: .inf
target: 0
dtype: Float32
device: 1.50
keep: lm_head
keep: [a, null]
layers: [q]
layers: [{keep: true}]
layers: [{macth: q}]
layers: [{match: q, method: lpord}]
layers: {match: q}
calibration: []
calibration: {samples: many words that go on and on for ever and a day}
calibration: {holdout: 0.9}
target_params: '0.1'
layers: [{match: q, method: {name: svd, rank: 3}, target: 0.5}]
layers: [{match: q, method: {name: svd, tol: 0.1}}]
embeddings: {method: {name: tt, rank: 3}, target: 0.5}
attention_layers: [1]
attention_layers: []
drop_layers: {}
latency: 0ms
positions: linear
norm: tensor
"""
SWEEPS = """
[{name: lprodd}]
[{name: svd, q: 3}]
[{name: lprod, p: x}]
[svdd]
[3]
"""
VERSIONS = ["", "recipe_version: '1'\n", "recipe_version: true\n", "recipe_version: 0\n",
            "recipe_version: 2\nof_the_future: 1\n"]  # fmt: skip
_EIGHT = "\n".join(f"{n}: &{n} [{','.join([f'*{o}'] * 8)}]" for o, n in pairwise("abcdefgh"))
NO_RECIPES = [
    "", "# only a comment\n", "\n- a\n", "hello", "a: b: c", "a:\n\tb: 1", "a: 1\n---\nb: 2",
    "a: 1\nb: \x01", "a: *b", "a: !!set {b}", "a: !mine 3", "a: !mine [3]", "a: !!int b",
    "? [a]\n: 1", '{"a": "\\ud83d"}', "a: &b [*b]", f"a: &a [x, x, x, x, x, x, x, x]\n{_EIGHT}",
    "x" * 100_001, "[" * 600, "recipe_version: 1\n",
]  # fmt: skip


def _recipes() -> Iterator[str]:
    yield from SEVERAL
    for options in METHODS.split("\n")[1:-1]:
        yield f"recipe_version: 1\nconvert:\n  method: {{{options}}}\n"
    for line in CONVERSIONS.split("\n")[1:-1]:
        yield f"recipe_version: 1\nconvert:\n  method: {{name: svd}}\n  {line}\n"
    for line in SWEEPS.split("\n")[1:-1]:
        yield f"recipe_version: 1\nconvert: {{method: svd}}\nsweep: {{methods: {line}}}\n"
    for version in VERSIONS:
        yield f"{version}convert: {{method: {{name: svd}}}}\n"
    yield from NO_RECIPES


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data and recipes."""
    folder = tmp_path_factory.mktemp("models")
    small_encoder(folder)
    for family in ("llama", "t5", "clip_text_model"):
        small(family, folder)
    for family in ("vit", "clip", "whisper"):
        model_folder(family, folder / family)
    model_folder("bert", folder / "mlm")
    classifier(folder / "three", 3)
    for name, options in {
        "wide": {"hidden_size": 64},
        "words": {"vocab_size": 120},
        "flat": {"num_hidden_layers": 1},
        "brief": {"max_position_embeddings": 8},
    }.items():
        headed("bert", folder / name, "BertModel", **options)
    text_file(folder / "texts.txt", sentences(40))
    pairs_file(folder / "pairs.jsonl")
    for name, classes in {"rows": 2, "rows3": 3, "stars": 4}.items():
        labelled_file(folder / f"{name}.jsonl", classes=range(classes))
    rows_file(folder / "names.jsonl", text=sentences(4), label=["a", "b", None, "a"])
    rows_file(folder / "unlabelled.jsonl", text=["a fox", "w30"], label=[-1, -1])
    for name in ("nothing.txt", "empty.csv"):
        (folder / name).touch()
    (folder / "svd.yaml").write_text(SVD)
    (folder / "variants.yaml").write_text(VARIANTS)
    (folder / "latin.yaml").write_bytes("name: \xe9".encode("latin-1"))
    return folder


def _files() -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in sorted(Path().rglob("*"))}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def _answer(typed: str) -> str:
    """Runs a command, which must change no file; gives what it printed."""
    before = _files()
    done = run(*shlex.split(typed))
    assert _files() == before, typed
    return f"$ tcompress {typed}\nexit {done.code}\n{done.out}{done.err}"


def _quoted(recipe: str) -> str:
    text = recipe if len(recipe) < 500 else f"{recipe[:60]}... {len(recipe):,} characters"
    shown = "".join(each if each.isprintable() or each == "\n" else repr(each) for each in text)
    return "".join(f"| {line}\n" for line in shown.splitlines())


def test_errors(place: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    blocks = [_answer(typed) for typed in COMMANDS]
    for recipe in _recipes():
        Path("my.yaml").write_text(recipe, "utf-8")
        blocks.append(_quoted(recipe) + _answer("recipes validate my.yaml"))
    golden.text("errors.txt", "\n".join(blocks))
