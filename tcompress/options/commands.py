"""What may be asked of commands beside what recipes say."""

from __future__ import annotations

from typing import Any, Literal

from tcompress.errors import InputError
from tcompress.fields import DATASET, FOLDER, MODEL, ExportFormat, Section, option
from tcompress.options.convert_options import METHOD, OUTPUT
from tcompress.options.steps import MEASURED, MEASUREMENT

THE_MODEL, CELLS, COMMON = "Model", "Cells", "Common options"
_SEVERAL: dict[str, Any] = {"positional": True, "splits": False, "min_length": 1}
_MODELS = {**MODEL, **_SEVERAL, "metavar": "MODEL..."}
_EITHER = "converted or dense models: folders, short names or hub ids"
_RECIPE = {"metavar": "FILE|NAME", "complete": "recipes"}


class Json(Section):
    """Form of the output of commands that take no time."""

    panel = COMMON

    as_json: bool = option(False, "print one JSON document to stdout, on failure too", "--json")


class Manner(Json):
    """Form of the output of commands."""

    quiet: bool = option(False, "show no progress", "--quiet", "-q")
    verbose: bool = option(False, "show what other libraries log")


class Trust(Section):
    """Permission to run code that comes with a model."""

    panel = COMMON

    allow_remote_code: bool = option(
        False, "run Python code that comes with the model; read it before"
    )


class Hub(Trust):
    """Access to the hub."""

    token: str | None = option(None, "access token for the hub; default `HF_TOKEN`")


class Access(Hub):
    """Revision of a model on the hub, and access to it."""

    revision: str | None = option(None, "branch, tag or commit on the hub")


class OneModel(Section):
    """The model that a command is about."""

    model: str = option(..., "folder, short name (`bert-base`) or hub id", positional=True, **MODEL)


class Written(Section):
    """Where a command writes."""

    panel = OUTPUT

    output: str | None = option(
        None,
        "folder to write; default a name made of the model and of what is done",
        "--output",
        "-o",
        **FOLDER,
    )
    force: bool = option(False, "replace the output if it is not empty")


class Measured(Section):
    """Arguments of `evaluate`: models, data, and where numbers go."""

    models: tuple[str, ...] = option(..., _EITHER, **_MODELS)
    baseline: str | None = option(
        None, "model to compare with; default the first one", panel=MEASUREMENT, **MODEL
    )
    save: bool = option(
        True, "do not keep the numbers in the models' `tcompress.json`", "--no-save", panel=OUTPUT
    )


class Timed(Section):
    """Arguments of `bench`: models, sizes, and where times go."""

    models: tuple[str, ...] = option(..., "models: folders, short names or hub ids", **_MODELS)
    against: str | None = option(
        None,
        "dense model to compare with; default the one that the model was made from",
        panel=THE_MODEL,
        **MODEL,
    )
    save: bool = option(
        True, "do not keep the times in the models' `tcompress.json`", "--no-save", panel=OUTPUT
    )


class Exported(Section):
    """Arguments of `export`."""

    model: str = option(
        ...,
        "folder, short name or hub id; for `dense` the folder of a converted model",
        positional=True,
        **MODEL,
    )
    to: Literal["dense", "onnx", "openvino"] = option(
        "dense",
        "`dense`: a plain model that computes the same, with dense weights; `onnx`: files for ONNX "
        "Runtime, sentence-transformers and transformers.js beside the model; `openvino`: one for "
        "OpenVINO and sentence-transformers, in float32",
    )


class OnnxFiles(Section):
    """Which ONNX files `export` writes."""

    panel = "ONNX files"

    int8: bool = option(
        False, "add a file with weights of 8 bits, which computes the same on every CPU"
    )
    bits: Literal[8, 4] | None = option(
        None, "add a file with weights of so many bits; 8 is `--int8`, 4 are in blocks of 32"
    )
    embedding_bits: Literal[8, 4] = option(8, "bits of embeddings in the file with 8")
    sentence_embedding: bool | None = option(
        None, "a second output, pooled and normalised in the graph; default for sentence encoders"
    )
    dense: bool = option(
        False, "multiply structured weights out, so that the files are as large as before"
    )

    @property
    def bits_of_files(self) -> tuple[int, ...]:
        """Bits of the weights of each file, float32 first."""
        chosen = {8} if self.int8 else set()
        return (32, *sorted(chosen | ({self.bits} if self.bits else set()), reverse=True))

    def refuse_bits(self, to: ExportFormat) -> None:
        """Refuse bits of no file, and fewer for OpenVINO, which runs them slower, less exactly."""
        bits = {"int8", "bits", "embedding_bits"}
        if to == "onnx" and self.embedding_bits != 8 and 8 not in self.bits_of_files:
            text = f"`--embedding-bits {self.embedding_bits}` is of the file with 8 bits, and none"
            raise InputError(f"{text} is asked for", "add `--int8`, or leave it out")
        if to == "openvino" and (given := self.model_dump(exclude_defaults=True, include=bits)):
            names = ", ".join(f"`--{name.replace('_', '-')}`" for name in given)
            text = f"{names} can only be given for ONNX files; those for OpenVINO are in float32"
            raise InputError(text, "add `--to onnx`, or quantise with OpenVINO's own tool, `nncf`")


class Reported(Section):
    """Arguments of `report`."""

    models: tuple[str, ...] = option(..., _EITHER, **_MODELS)
    length: int = option(
        128, "tokens to count multiply-adds for; images have their own", gt=0, le=10**9
    )
    layers: bool = option(False, "add a row for each layer")
    html: str | None = option(
        None,
        "write a page too: one file with tables and charts that needs no network",
        panel=OUTPUT,
        metavar="FILE",
    )
    figures: str | None = option(
        None, "write the page's pictures to this folder, as SVG", panel=OUTPUT, **FOLDER
    )


class Tables(Section):
    """Tables for spreadsheets and papers."""

    panel = OUTPUT

    csv: str | None = option(
        None, "write all numbers as CSV too, in full precision", metavar="FILE"
    )
    latex: str | None = option(
        None, "write a table for LaTeX too, with intervals; it needs `booktabs`", metavar="FILE"
    )


class Inspected(OneModel):
    """Arguments of `inspect`."""

    layers: bool = option(False, "list every layer, not one row for equal ones")
    plan: bool = option(
        False, "build the model and plan a conversion, where names would tell enough"
    )
    verify: bool = option(
        False, "read every file and compare it with the checksums that were written"
    )


class Shown(Section):
    """Where `demo` keeps what it makes."""

    keep_dir: str | None = option(None, "keep the converted models here", **FOLDER)


class Passed(Section):
    """Arguments that `lm-eval` passes on."""

    arguments: tuple[str, ...] = option(
        (), "passed on to lm-evaluation-harness", metavar="ARGS...", positional=True, splits=False
    )


class RecipeName(Section):
    """A recipe that ships."""

    name: str = option(
        ...,
        "a name out of `tcompress recipes list`",
        metavar="NAME",
        complete="shipped_recipes",
        positional=True,
    )


class Copied(RecipeName):
    """Arguments of `recipes copy`."""

    target: str = option(".", "file or folder to write", metavar="FILE", positional=True)
    force: bool = option(False, "overwrite a file")


class Checked(Section):
    """Arguments of `recipes validate`."""

    files: tuple[str, ...] = option(
        ..., "recipes", metavar="FILE...", complete="recipes", **_SEVERAL
    )


class FromRecipe(Section):
    """A recipe that flags change."""

    recipe: str | None = option(
        None, "start from a recipe; options override it", panel=METHOD, **_RECIPE
    )


class Changes(Section):
    """Changes of a recipe, and runs of it with other seeds."""

    seeds: int | None = option(
        None,
        "repeat with so many seeds, the recipe's own and those that follow; tables show mean ± "
        "standard deviation",
        panel=METHOD,
        metavar="N",
        gt=0,
        le=1000,
    )
    changes: tuple[str, ...] = option(
        (),
        "change a value of the recipe, such as `finetune.steps=200`",
        "--set",
        panel=METHOD,
        metavar="KEY=VALUE",
        splits=False,
    )


class Planned(Section):
    """Dry runs."""

    panel = COMMON

    dry_run: bool = option(
        False, "print the plan and what it will cost; no weight is read, nothing is written"
    )


class Run(Changes):
    """Arguments of `run`: the recipe, and the model."""

    recipe: str = option(
        ...,
        "file, or a name out of `tcompress recipes list`",
        positional=True,
        **{**_RECIPE, "metavar": "RECIPE"},
    )
    model: str | None = option(None, "another model than the recipe's", panel=THE_MODEL, **MODEL)
    variants: tuple[str, ...] = option(
        (),
        "run a variant of the recipe, such as `smoke`; what is written is named after it",
        "--variant",
        panel=METHOD,
        metavar="NAME",
        splits=False,
    )


class Converted(FromRecipe):
    """Arguments of `convert` beside what recipes say of a conversion."""

    structure: str | None = option(
        None,
        "with an attention replacement, the structure of weights; default that of its paper where "
        "a size is given (`--target`, `--rank`, `--p`, ...), else `none`",
        panel=METHOD,
        metavar="NAME",
        complete="structures",
    )


class Swept(FromRecipe, Changes):
    """Arguments of `sweep` beside what recipes say of cells."""

    finetune_steps: int | None = option(
        None, "heal every model for so many steps; measure before and after", panel=CELLS, gt=0
    )
    train_data: tuple[str, ...] = option(
        (), "unlabelled data to heal on; default what ships", panel=CELLS, splits=False, **DATASET
    )
    bench: bool = option(False, "time every model beside the dense one too", panel=MEASURED)


class Described(Section):
    """Arguments of `methods`."""

    names: tuple[str, ...] = option(
        (), "methods; default all", metavar="[NAME...]", complete="methods", positional=True
    )
