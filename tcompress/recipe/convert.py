"""What a recipe says about the conversion of a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tcompress.recipe.attention import AttentionSpec
from tcompress.recipe.budget import Budget, Bytes, Parameters, bytes_of, parameters_of
from tcompress.recipe.methods import AnyMethod, AutoSpec
from tcompress.recipe.scratch import Norm, Positions, needs_data, usual_calibration
from tcompress.recipe.sections import (
    BUDGETS,
    DEPTH,
    TWO_SIZES,
    Calibration,
    Embeddings,
    LayerRule,
    Section,
    tol_of,
)
from tcompress.structures import Spec

DType = Literal["float32", "float16", "bfloat16"]
Device = Annotated[
    str,
    Field(
        pattern=r"^(auto|cpu|mps|xpu|cuda(:[0-9]{1,3})?)$",
        examples=["auto", "cpu", "cuda", "cuda:1", "mps"],
        description="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`",
    ),
]


# No model has as many, and a list of all of them would not end.
BlockIndex = Annotated[int, Field(ge=0, lt=1000)]
BlockCount = Annotated[int, Field(gt=0, lt=1000)]


class Convert(Section):
    """How a model is rewritten: structured layers, another attention, fewer blocks."""

    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="`pretrained`: weights are fitted to those of the model; `random`: none are "
        "read, all are drawn anew, to train from scratch",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the weights, with `init: random`")
    method: AnyMethod | None = Field(
        None,
        description="structure of the rewritten layers, or `auto`, which chooses one for each; "
        "without one their weights stay dense",
    )
    attention: AttentionSpec | None = Field(
        None, description="mechanism that mixes tokens; default the model's own"
    )
    attention_layers: tuple[BlockIndex, ...] | None = Field(
        None,
        description="blocks whose attention is exchanged, from 0, in every stack; default all",
    )
    keep_layers: tuple[BlockIndex, ...] | dict[str, tuple[BlockIndex, ...]] | None = Field(
        None,
        description="blocks that stay, from 0, such as `[1, 3, 5]`; by stack where there are "
        "several, such as `{decoder: [0, 2]}`",
    )
    drop_layers: BlockCount | Literal["auto"] | dict[str, BlockCount] | None = Field(
        None,
        description="number of blocks to drop, those whose loss changes the model least on "
        "calibration data; by stack where there are several; `auto`: as many as serve the budget "
        "best, which then counts dropped layers too",
    )
    append_layers: BlockCount | None = Field(
        None,
        description="copies of the last block to put on top of it, numbered on from it; without "
        "`attention_layers` they are where `attention` stands",
    )
    target: float | None = Field(
        None, gt=0, lt=1, description="kept fraction of the rewritten layers' parameters"
    )
    target_params: Parameters | None = Field(
        None, description="most parameters of the whole model, such as `30M`, in place of `target`"
    )
    target_bytes: Bytes | None = Field(
        None,
        description="most bytes of the weights on disk, such as `60MB`, in place of `target`; "
        "headers of files, some kilobytes, come on top",
    )
    max_error: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="in place of `target`: largest predicted error of the rewritten layers' "
        "outputs, squared, weighed by what they are worth to the model and summed over layers, "
        "relative to that of leaving all of them out; without data of the weights alone",
    )
    allocation: Literal["loss", "uniform"] = Field(
        "loss",
        description="how a budget is shared out: by the predicted loss that parameters save, or "
        "the same fraction for all layers; without calibration data always the latter, except "
        "under `max_error`",
    )
    residual_rank: int = Field(
        0,
        ge=0,
        description="rank of a low-rank term added to the structure; 0 leaves it to the budget",
    )
    keep: tuple[str, ...] = Field((), description="layers left dense, as in `layers[].match`")
    only: tuple[str, ...] = Field(
        (), description="layers to rewrite, as in `layers[].match`; default all"
    )
    layers: tuple[LayerRule, ...] = Field((), description="exceptions by layer")
    embeddings: Embeddings | None = Field(
        None, description="how the word embedding is rewritten; left as it is by default"
    )
    positions: Positions = Field(
        "host",
        description="with `init: random` and `lprod`, what the table of positions holds: the "
        "`host`'s own; sinusoids that are not trained, whose frequencies are scaled slice by slice "
        "(`standard`: all alike, `linear`, `exponential`, `harmonic`); `learned`: all of it is "
        "trained",
    )
    norm: Norm = Field(
        "host",
        description="with `init: random` and `lprod`, what layer norms inside blocks normalise: "
        "all features (`host`), or each slice by itself (`tensor`)",
    )
    calibration: Calibration = Field(
        default_factory=usual_calibration,
        description="calibration data; with `init: random` there is none",
        json_schema_extra={"default": Calibration().model_dump(mode="json")},
    )
    dtype: DType | None = Field(None, description="dtype of the output; default as the source")
    device: Device = "auto"
    max_shard_size: str = Field(
        "2GB",
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?[KMG]i?B$",
        examples=["2GB", "500MB"],
        description="largest weight file of the output",
    )

    @model_validator(mode="after")
    def _check(self) -> Convert:
        found = (self._init_problems(), self._depth_problems(), self._budget_problems())
        problems = list(chain.from_iterable(found))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _init_problems(self) -> Iterator[str]:
        if self.init == "random":
            yield from needs_data(self)
        lprod = getattr(self.method, "name", None) == "lprod"
        for name in ("positions", "norm"):
            value = getattr(self, name)
            if value != "host" and not (self.init == "random" and lprod):
                yield (
                    f"`{name}: {value}` is for models that are trained from scratch in slices: it "
                    "needs `init: random` and the method `lprod`"
                )

    def _depth_problems(self) -> Iterator[str]:
        given = [name for name in DEPTH if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"`{given[0]}` and `{given[1]}` are both given; allowed is one"
        if self.attention_layers is not None and self.attention is None:
            yield "`attention_layers` needs `attention`, since it is about mechanisms"
        if self.method is None:
            scratch = self.init == "random"
            if not (self.cuts or self.embeddings or self.attention or scratch):
                yield "there is nothing to do: give `method`, `attention`, or `keep_layers`"
            alone = (*BUDGETS, "residual_rank", "keep", "only", "layers")
            given = [f"`{name}`" for name in alone if getattr(self, name)]
            if given:
                yield f"{', '.join(given)} needs a `method`, since it is about layers"

    def _budget_problems(self) -> Iterator[str]:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        fixed = self.method is not None and self.method.fixes_size
        if tol_of(self.method) is not None:
            given.append("tol")
        if len(given) > 1:
            names = " and ".join(f"`{name}`" for name in given)
            yield f"{names} are given together; allowed is one of them"
        elif given and fixed:
            yield TWO_SIZES.format(given[0])
        for name, parse in (("target_params", parameters_of), ("target_bytes", bytes_of)):
            value = getattr(self, name)
            if value is not None and parse(value) < 1:
                yield f"`{name}` is `{value}`, allowed is 1 or more"
        if any(tol_of(rule.method) is not None for rule in self.layers):
            yield "`tol` is for all layers; rules in `layers` take a `rank` or `target`"
        if fixed and any(rule.target and rule.method is None for rule in self.layers):
            yield TWO_SIZES.format("layers[].target")
        if self.max_error is not None and self.method is not None and self.method.pools:
            yield "`max_error` sizes layers one by one, which banks cannot: give a target instead"
        sizes = ("target", "target_params", "target_bytes")
        if self.weighs_depth and (self.method is None or not any(map(given.count, sizes))):
            yield (
                "`drop_layers: auto` shares a budget between blocks and layers: give a `method` "
                "and a `target`, `target_params` or `target_bytes`"
            )
        if self.weighs_depth and self.calibration.source == "none":
            yield "`drop_layers: auto` measures on data: choose a calibration source"
        if isinstance(self.method, AutoSpec) and self.residual_rank:
            yield "`residual_rank` is chosen by `auto` itself: leave it out"

    @property
    def cuts(self) -> bool:
        """Whether blocks are dropped, or put on top."""
        return any(getattr(self, name) is not None for name in DEPTH)

    @property
    def weighs_depth(self) -> bool:
        """Whether the number of dropped blocks is chosen too, under the budget."""
        return self.drop_layers == "auto"

    @property
    def weighs_methods(self) -> bool:
        """Whether methods are tried out under the budget, and measured on data held out."""
        tries = isinstance(self.method, AutoSpec) and self.method.trials
        sized = self.budget is not None and self.budget.is_size
        return tries and sized and self.calibration.source != "none" and self.init != "random"

    @property
    def label(self) -> str:
        """What is done, for people: mechanism, method, `depth`, `embeddings`, or several."""
        words = [part.name for part in (self.attention, self.method) if part is not None]
        words += ["depth"] if self.cuts else []
        words += ["embeddings"] if self.embeddings else []
        return " + ".join(words) or "dense"

    @property
    def within_blocks(self) -> Convert:
        """The same without a choice of blocks: what is done to a model that was cut already."""
        return self.model_copy(update=dict.fromkeys(DEPTH, None))

    @property
    def without_method(self) -> Convert:
        """The same with all layers dense."""
        none = {"method": None, "residual_rank": 0, "keep": (), "only": (), "layers": ()}
        return self.model_copy(update={**none, **dict.fromkeys(BUDGETS, None)})

    @property
    def budget(self) -> Budget | None:
        """What limits the size, or the error, if anything does."""
        if self.target_params is not None:
            return Budget("target_params", parameters_of(self.target_params))
        if self.target_bytes is not None:
            return Budget("target_bytes", bytes_of(self.target_bytes))
        if self.max_error is not None:
            return Budget("max_error", self.max_error)
        tol = tol_of(self.method)
        if tol is not None:
            return Budget("tol", tol)
        return None if self.target is None else Budget("target", self.target)

    def at(self, target: float | None, method: Spec | None = None) -> Convert:
        """The same with a kept fraction in place of any other budget.

        Args:
            target: The fraction.
            method: Another method, if any.
        """
        own = method or self.method
        if own is not None and tol_of(own) is not None:
            own = own.model_copy(update={"tol": None})
        others = dict.fromkeys(BUDGETS, None)
        return self.model_copy(update={**others, "target": target, "method": own})

    @property
    def by_loss(self) -> bool:
        """Whether sizes, or structures, follow predicted loss."""
        if self.budget is None or self.method is None or self.method.pools:
            return False
        return self._only_predicted or self._asks_for_loss

    @property
    def _only_predicted(self) -> bool:
        """Whether nothing but a prediction can tell what layers become."""
        limits_error = self.budget is not None and not self.budget.is_size
        return limits_error or isinstance(self.method, AutoSpec)

    @property
    def _asks_for_loss(self) -> bool:
        asked = self.budget is not None and (self._only_predicted or self.allocation == "loss")
        return asked and self.calibration.source != "none"

    @property
    def surveys(self) -> bool:
        """Whether a conversion begins with a backward pass over the calibration data."""
        if self.calibration.source == "none":
            return False
        weighs = self.calibration.output_moments
        return self.by_loss or (self._asks_for_loss if weighs is None else weighs)
