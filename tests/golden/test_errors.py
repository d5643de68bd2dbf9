"""What is said of wrong command lines and recipes: one transcript with exit codes.

A command stands on a line of its own, as it is typed after `tcompress`. None of them writes
anything. What depends on the machine, such as a library that is missing, has tests elsewhere.
"""

from __future__ import annotations

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

COMMANDS = r"""
convet
recipes zzz
convert
convert ~nobody-at-all/m
convert m --tagret
convert m --calibration x
convert m --qqqqqq
convert m --p
convert m --p many
convert m --target abc
convert m --damping x
convert m --json --tagret 1
convert --json
convert m --p 0 --json
convert ./modell --p 2
convert ""
convert mlm/config.json --method svd --rank 2
convert bert-small --method svd --rank 2
convert mlm -o three
convert mlm -o mlm --force
convert mlm --method lprd
convert mlm --method SVD
convert mlm --method qqq
convert mlm --recipe minilm-lpord
convert mlm --device gpu --max-shard-size tiny
convert mlm --device cuda:77
convert mlm --dtype float8
convert mlm --calib missing.txt
convert mlm --calib nothing.txt
convert mlm --calib texts.txt --calib-columns review
convert mlm --revision main
convert mlm --keep 're:layer.('
convert mlm --keep 're:(.+)+x'
convert mlm --keep bert.encoder
convert mlm --only nothing.like.it
convert mlm --rank 4
convert mlm --p 0
convert mlm --p 7 --calib none
convert mlm --transform dcd
convert mlm --target 25 --calib-samples -1
convert mlm --target 0.25 --target-params 1M
convert mlm --target-params 5K --method svd --calib none
convert mlm --target-bytes many
convert mlm --max-error 2
convert mlm --method svd
convert mlm --method svd --rank 3 --target 0.5
convert mlm --method svd --rank 3 --tol 0.1
convert mlm --method svd --rank 4,8
convert mlm --method lowrank --p 4 --tubal-rank 2
convert mlm --method tt
convert mlm --method tt --rank 4 --modes 64=8
convert mlm --method tt --rank 4,x
convert mlm --method tt --rank 4,0
convert mlm --method tt --rank 4 --order 1 --apply build
convert mlm --method tt --rank 4,8 --calib none
convert mlm --method tt --target 0.01 --calib none
convert mlm --method qtt --order 3
convert mlm --method tucker --rank 3,4
convert mlm --method tucker --share all --rank 3
convert mlm --method auto
convert mlm --method auto --target 0.01 --calib none
convert mlm --method auto --offer lowrank,foo --target 0.5
convert mlm --offer lowrank
convert mlm --method svd --target 0.2 --offer tt
convert mlm --embeddings sdv
convert mlm --embeddings lprod
convert mlm --embeddings hot
convert mlm --embeddings auto
convert mlm --embeddings svd --embedding-target 1.5
convert mlm --embedding-target 0.5
convert vit --embeddings svd --method none
convert mlm --method none
convert mlm --keep-layers 0-99999999999
convert mlm --keep-layers 1,4
convert mlm --keep-layers 1 --drop-layers 1
convert mlm --drop-layers 2
convert mlm --drop-layers auto --method svd --rank 3
convert mlm --append-layers 0
convert mlm --method hot
convert mlm --method hot --core cp
convert mlm --method hot --kernel poly
convert mlm --method hot --grid '4;4'
convert mlm --method hot --layers a
convert mlm --method hot --structure tga
convert mlm --method lprod --grid 4,4
convert mlm --structure svd
convert mlm --method hit
convert mlm --method tsa --filter-order 1
convert mlm --method tga --filter-order 3
convert mlm --method tga --layers 7
convert vit --method hot --grid 7,7 --dry-run
convert llama --method tam
convert mlm --init random --method auto --target 0.5
convert mlm --positions linear
finetune
finetune bert-small --objective foo=1
finetune bert-small --objective hidden=x
finetune bert-small --objective hidden
finetune bert-small --objective hidden=0,logits=0
finetune bert-small --objective hidden=-1
finetune bert-small --columns text
finetune bert-small --teacher-blocks 0,x
finetune bert-small --task naming
finetune bert-small --lr 0 --max-length 1
finetune bert-small --lr 1e30
finetune bert-small --steps 0
finetune bert-small --steps few
finetune bert-small --train none
finetune bert-small --device gpu
finetune bert-small --data texts.txt --device cuda:77
finetune bert-small --task sts --data texts.txt
finetune bert-small --task classification --data names.jsonl
finetune three --task classification --data rows.jsonl
finetune three --task classification --data stars.jsonl
finetune three --task regression --data pairs.jsonl
finetune bert-small --data nothing.txt
finetune bert-small --data missing.txt
finetune bert-small --data texts.txt --validation nothing.txt
finetune bert-small --data texts.txt --columns txt=text
finetune bert-small --data rows.jsonl --columns text=label
finetune bert-small --data texts.txt --teacher wide
finetune bert-small --data texts.txt --teacher words
finetune bert-small --data texts.txt --teacher vit
finetune bert-small --data texts.txt --teacher flat
finetune bert-small --data texts.txt --teacher brief
finetune bert-small --data texts.txt --teacher ./nowhere
finetune bert-small --data texts.txt --teacher none
finetune bert-small --data texts.txt --teacher none --objective hidden=1,logits=1
finetune bert-small --data texts.txt --teacher-blocks 1,0
finetune bert-small --task classification --data rows.jsonl --teacher three --objective logits=1
finetune three --task classification --data rows3.jsonl --teacher llama-small --objective logits=1
finetune bert-small --data texts.txt --objective task=1
finetune bert-small --data texts.txt --objective logits=1
finetune bert-small --data texts.txt -o bert-small --force
finetune bert-small --data texts.txt -o bert-small
finetune bert-small --data texts.txt -o . --force
finetune bert-small --data texts.txt -o bert --force
finetune bert --data texts.txt
finetune bert --task sts --data pairs.jsonl --block-steps 2
finetune bert --task sts --data pairs.jsonl --train rewritten
finetune t5-small --data texts.txt --block-steps 2
finetune clip_text_model --task masked-lm --data texts.txt
finetune vit --teacher vit
finetune clip --data texts.txt --teacher clip
finetune whisper --data texts.txt --teacher whisper
finetune ./nowhere --data texts.txt
inspect
inspect ./nowhere --json
inspect mlm --verify
report mlm --length 0
report ./nowhere
report mlm --html three
evaluate bert
evaluate bert --task st --data pairs.jsonl
evaluate bert --task classification --data rows.jsonl
evaluate bert --task sts --data rows.jsonl
evaluate bert --task sts --data pairs.jsonl --pack eos
evaluate bert --task sts --data pairs.jsonl --threshold 0.9x
evaluate bert --task sts --data pairs.jsonl --threshold good
evaluate bert --task image-classification --data rows.jsonl
evaluate bert --task sts --data nowhere.csv --json
evaluate three --task classification --data unlabelled.jsonl
evaluate three --task classification --data empty.csv
evaluate three --task classification --data rows.jsonl --columns two
bench mlm
bench bert-small --batch 0 --json
bench bert-small --mode quick
bench bert-small --mode compiled --keep-weights
bench bert-small --repeats 0
bench bert-small --length 65
bench bert-small --against ./nowhere
export folder --to dens
export mlm
export bert-small -o three
run
run minilm-lpord
run missing.yaml
run svd.yaml
run svd.yaml --model mlm --set convert.target=high
run svd.yaml --model mlm --set convert.nothing=1
run svd.yaml --model mlm --set convert.target
run svd.yaml --model mlm --variant smoke
run variants.yaml --model mlm --variant smok
run variants.yaml --model mlm --variant wrong
run variants.yaml --model mlm --variant senseless
sweep bert --methods svd,hot --calib none
sweep bert --methods svd:p=3 --calib none
sweep bert --methods auto:q=3 --calib none
sweep bert --methods svd:rank=3 --calib none
sweep bert --methods lprod:p --calib none
sweep bert --targets 0.5,2 --calib none
sweep bert --task sts --calib none
sweep bert --data a.csv --calib none
sweep bert --limit 3 --calib none
sweep bert --train-data a.txt --calib none
sweep bert --finetune-steps 3 --calib none
methods svd
demo extra
lm-eval run
recipes show encoder/minilm-lpord
recipes show bert-lprod-dct
recipes show vit-lprd
recipes show qqqqqq
recipes show ../recipes/vision/vit-lprod
recipes copy vision/vit-lprod svd.yaml
recipes copy vision/vit-lprod svd.yaml/below/my.yaml
recipes validate frist.yaml
recipes validate a/b.yaml
recipes validate .
recipes validate latin.yaml
recipes validate svd.yaml/a.yaml
recipes validate variants.yaml
"""

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
    blocks = [_answer(typed) for typed in COMMANDS.strip().splitlines()]
    for recipe in _recipes():
        Path("my.yaml").write_text(recipe, "utf-8")
        blocks.append(_quoted(recipe) + _answer("recipes validate my.yaml"))
    golden.text("errors.txt", "\n".join(blocks))
