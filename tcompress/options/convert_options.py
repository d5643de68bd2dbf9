"""What may be asked of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tcompress.errors import listed
from tcompress.fields import (
    DEVICES,
    FIT,
    FRACTION,
    Device,
    DType,
    Section,
    Sources,
    option,
    read_blocks,
    read_dropped,
    read_factors,
    read_kept,
)
from tcompress.options.limits import (
    LIMITS,
    Budget,
    Bytes,
    Limit,
    Parameters,
    Speedup,
    bytes_of,
    milliseconds_of,
    parameters_of,
    speedups_of,
)
from tcompress.options.method_options import (
    AnyMethod,
    AttentionSpec,
    AutoSpec,
    MethodSpec,
    TableMethod,
)
from tcompress.structures import Spec

Positions = Literal["host", "standard", "linear", "exponential", "harmonic", "learned"]
Norm = Literal["host", "tensor"]

GOAL, METHOD, OUTPUT = "Goal", "Method", "Output"
BLOCKS = "Blocks, embeddings and training from scratch"
FEWEST, MOST = 1024, 4096  # texts that are drawn where no number is given
ROWS = 16  # tokens for each input of the widest layer: moments of fewer do not carry over
_PATTERNS = {"panel": METHOD, "metavar": "PATTERN", "splits": False}


class Calibration(Section):
    """Data that the fit may look at; labels are never used."""

    panel = "Data"

    source: Sources = option(
        ("builtin",),
        "data to fit on; `builtin`, `none`, txt, csv, jsonl or parquet files, folders of images, "
        "or hub ids; several have equal shares",
        "--calib",
        metavar="DATA",
        complete="calibrations",
        splits=False,
        min_length=1,
    )
    split: str = option("train", "split of a hub dataset", off=True)
    columns: tuple[str, ...] = option(
        (), "text or image columns; guessed where not given", "--calib-columns", metavar="NAME,..."
    )
    samples: int | None = option(
        None,
        f"number of texts or images; default {FEWEST:,}, and up to {MOST:,} texts where that gives "
        f"{ROWS} tokens for each input of the widest layer; built-in text stands beside files that "
        f"have fewer than {FEWEST:,}",
        "--calib-samples",
        gt=0,
    )
    max_length: int = option(256, "longest text, in tokens", gt=1)
    batch_size: int = option(32, "texts or images run together", gt=0, off=True)
    holdout: float = option(
        0.1, "share of the samples kept back to measure errors on", gt=0, lt=0.9, off=True
    )
    damping: float = option(
        0.1,
        "ridge added to the moments; where there is one row per regressor, in units of their mean "
        "diagonal; shrinks with more rows",
        panel=FIT,
        ge=0,
    )
    output_moments: bool | None = option(
        None,
        "weigh errors by what they cost the model; known from one backward pass without labels; "
        "default where `allocation` is by loss",
        "--output-moments/--input-moments",
        panel=FIT,
    )
    probes: int = option(
        1,
        "random gradients of each sample; more tell more of little data, each for one more pass "
        "forward and back",
        panel=FIT,
        ge=1,
        le=64,
    )
    mixed_precision: Literal["no", "bf16"] = option(
        "no",
        "passes in bfloat16; the products of blocks alone, which takes less time where a processor "
        "or GPU multiplies it fast; the output head and fits stay as they are",
        panel=FIT,
    )
    seed: int = option(0, "seed of all random choices", ge=0)

    @model_validator(mode="after")
    def _check_source(self) -> Calibration:
        if "none" in self.source and len(self.source) > 1:
            raise ValueError("`none` stands beside other data in `source`; leave one of them out")
        return self

    @property
    def is_none(self) -> bool:
        """True without data."""
        return self.source == ("none",)

    @property
    def files(self) -> tuple[str, ...]:
        """Data of the user's own, beside which the shipped one may stand."""
        return tuple(name for name in self.source if name not in ("none", "builtin"))

    @property
    def count(self) -> int:
        """Number of images, and the least number of texts."""
        return self.samples or FEWEST

    @property
    def most(self) -> int:
        """Most texts that are drawn."""
        return self.samples or MOST

    def enough(self, tokens: float, widest: int) -> int:
        """Number of texts of so many tokens that are drawn for a layer of so many inputs."""
        return min(self.most, max(self.count, round(ROWS * widest / tokens)))

    def within(self, longest: int | None) -> Calibration:
        """The same with texts that are no longer than a replacement can take."""
        if longest is None or longest >= self.max_length:
            return self
        return self.model_copy(update={"max_length": longest})


Channels = Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0, lt=1)]


class LayerRule(Section):
    """An exception for some layers; of what several rules say, the last word counts."""

    match: str = Field(description="layer name with `*` wildcards, or `re:` and an expression")
    keep: bool = Field(False, description="leave these layers dense")
    method: MethodSpec | None = Field(None, description="another method for these layers")
    residual_rank: int | None = Field(None, ge=0, description="another residual rank")
    target: float | None = Field(None, gt=0, lt=1, description="another kept fraction")

    @model_validator(mode="after")
    def _check_size(self) -> LayerRule:
        if self.target is not None:
            refuse_two_sizes(self.method, "target")
        return self


class Embeddings(Section):
    """Rewriting of the word embedding, and with it of an output head that is tied to it."""

    panel = BLOCKS

    method: TableMethod = option(
        ..., "structure of the word embedding", "--embeddings", whole=True, metavar="METHOD"
    )
    target: float | None = option(
        None, "kept fraction of the word embedding", "--embedding-target", **FRACTION
    )

    @model_validator(mode="after")
    def _check_size(self) -> Embeddings:
        if getattr(self.method, "mixes_cores", False):
            raise ValueError("the word embedding shares nothing with layers: leave `share` out")
        if tol_of(self.method) is not None:
            raise ValueError("`tol` is for layers: give the table a `rank` or a `target`")
        if self.target is not None and getattr(self.method, "rank", None) is not None:
            raise ValueError(TWO_SIZES.format("target"))  # no other term stands beside a table's
        if not self.method.has_size and self.target is None:
            raise ValueError(f"`{self.method.name}` needs a size: give `target`")
        return self


DEPTH = ("keep_layers", "drop_layers", "append_layers")
"""Keys that choose blocks; allowed is one."""

WIDTHS = ("keep_neurons", "head_size")
"""Fields that say how many channels stay."""

TWO_SIZES = "`rank` and `{}` are given together, and each sets the size; allowed is one of them"


def tol_of(method: Spec | None) -> float | None:
    """Returns the tolerance of a method's options, if they have one."""
    return getattr(method, "tol", None)


def refuse_two_sizes(method: Spec | None, budget: str) -> None:
    """Raises `ValueError` where a budget stands beside options that leave nothing to it."""
    if method is not None and method.fixes_size:
        raise ValueError(TWO_SIZES.format(budget))


def _usual_calibration(said: Mapping[str, Any]) -> Calibration:
    return Calibration(source=("none",)) if said.get("init") == "random" else Calibration()


# No model has as many, and a list of all of them would not end.
BlockIndex = Annotated[int, Field(ge=0, lt=1000)]
BlockCount = Annotated[int, Field(gt=0, lt=1000)]


class Convert(Section):
    """Rewriting of a model: structured layers, another attention, fewer blocks."""

    panel = GOAL

    init: Literal["pretrained", "random"] = option(
        "pretrained",
        "where weights come from; `pretrained`: they are fitted to those of the model; `random`: "
        "none are read, all are drawn anew, to train from scratch",
        panel=BLOCKS,
    )
    seed: int = option(0, "seed of the weights, with `init: random`", ge=0, lt=2**32, off=True)
    adapter: Literal["merge"] | None = option(
        None,
        "`merge`: a PEFT adapter is put into the weights; that in the model's folder, or alone in "
        "its own, by PEFT, which has to be installed; by default it is refused",
        panel=BLOCKS,
    )
    method: AnyMethod | None = option(
        None,
        "structure of the rewritten layers, or `auto`; see `tcompress methods`; `auto` chooses one "
        "for each layer; without one their weights stay dense",
        panel=METHOD,
        metavar="NAME",
        complete="methods",
    )
    attention: AttentionSpec | None = option(
        None, "what mixes tokens instead; default the model's own", "--method", panel=METHOD
    )
    attention_layers: tuple[BlockIndex, ...] | None = option(
        None,
        "blocks whose attention is exchanged, from 0; in every stack; default all",
        "--layers",
        panel=METHOD,
        metavar="N,N,...",
        read=read_blocks,
    )
    keep_layers: tuple[BlockIndex, ...] | dict[str, tuple[BlockIndex, ...]] | None = option(
        None,
        "blocks that stay, from 0; such as `[1, 3, 5]`; by stack where there are several, such as "
        "`{decoder: [0, 2]}`",
        panel=BLOCKS,
        metavar="[STACK:]N,N,...",
        read=read_kept,
    )
    drop_layers: BlockCount | Literal["auto"] | dict[str, BlockCount] | None = option(
        None,
        "number of blocks to drop; those whose loss changes the model least on calibration data; "
        "by stack where there are several; `auto`: as many as serve the budget best, which then "
        "counts dropped layers too",
        panel=BLOCKS,
        metavar="[STACK:]N|auto",
        read=read_dropped,
    )
    append_layers: BlockCount | None = option(
        None,
        "copies of the last block to put on top of it; numbered on from it; without "
        "`attention_layers` they are where `attention` stands",
        panel=BLOCKS,
    )
    vocab: Annotated[int, Field(gt=0, le=10**7)] | Literal["data"] | None = option(
        None,
        "tokens that stay; `data`: those that the data of `--calib` needs, all of which is "
        "counted; a number: so many, the most frequent ones of the data, or without data of the "
        "tokenizer's own ranks; special tokens always stay, and letters or bytes, so that any text "
        "can be written",
        panel=BLOCKS,
        metavar="data|N",
    )
    target: float | None = option(
        None,
        "kept fraction of the rewritten layers' parameters",
        **FRACTION,
        limits=Limit("size", share=True),
    )
    target_params: Parameters | None = option(
        None,
        "most parameters of the whole model, such as `30M`; in place of `target`",
        metavar="N|30M",
        limits=Limit("size", read=parameters_of, written="{:,.0f}"),
    )
    target_bytes: Bytes | None = option(
        None,
        "most bytes of the weights on disk, such as `60MB`; in place of `target`; headers of "
        "files, some kilobytes, come on top",
        metavar="60MB",
        limits=Limit("size", "bytes", bytes_of, "{:,.0f}"),
    )
    speedup: Speedup | tuple[Speedup, ...] | None = option(
        None,
        "how many times as fast as the dense model a pass is to be; what layers take is measured "
        "on this machine, and the model as a whole before anything is fitted; beside it a size may "
        "be given, and both hold; of several, such as `2,4,8`, each is a model in the output, "
        "compared in one table",
        metavar="FACTOR,...",
        read=read_factors,
        limits=Limit("resource", "nanoseconds", speedups_of),
    )
    latency: str | None = option(
        None,
        "most time of a pass, such as `5ms`; in place of `speedup`",
        metavar="5ms",
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?m?s$",
        examples=["5ms"],
        limits=Limit("resource", "nanoseconds", milliseconds_of, "{:g}ms"),
    )
    at: str | None = option(
        None,
        "the pass that `speedup` and `latency` are about; texts x tokens, default 32x128, or "
        "`decode`, one token after 128 others; pictures have a length of their own",
        metavar="32x128|decode",
        pattern=r"^([1-9][0-9]{0,5}x[1-9][0-9]{0,5}|decode)$",
        examples=["32x128", "1x16", "decode"],
    )
    threads: int | None = option(
        None, "threads of that pass on a CPU; default PyTorch's", gt=0, le=4096
    )
    max_error: float | None = option(
        None,
        "largest predicted error of the rewritten layers' outputs; squared, weighed by what they "
        "are worth to the model and summed over layers, relative to that of leaving all of them "
        "out; without data of the weights alone; in place of `target`",
        **FRACTION,
        limits=Limit("error"),
    )
    max_loss: float | None = option(
        None,
        "most agreement with the dense model to lose, such as 1%; on calibration samples held out: "
        "the share of other classes or tokens, or what is missing to a rank correlation of 1 "
        "between similarities of embeddings; models are tried until the smallest within it is "
        "found, or with `at` the fastest",
        **FRACTION,
        limits=Limit("error"),
    )
    allocation: Literal["loss", "uniform"] = option(
        "loss",
        "share a budget by loss saved, or alike; without calibration data always the latter, "
        "except under `max_error`",
    )
    keep_neurons: Channels | None = option(
        None,
        "neurons that feed-forwards keep; a number or a fraction; a `method` then stores what "
        "width leaves, and without one these are plain smaller matrices",
        panel=METHOD,
        metavar="N|FRACTION",
    )
    head_size: Channels | None = option(
        None,
        "dimensions that heads of attention keep; a number or a fraction; where positions rotate "
        "queries and keys, of values alone",
        panel=METHOD,
        metavar="N|FRACTION",
    )
    plain: bool = option(
        False,
        "a model that loads without tcompress; by plain Transformers, and by engines with model "
        "code of their own; one width of feed-forward for all blocks, and fewer blocks, as far as "
        "the keys of its own `config.json` can say it",
        panel=METHOD,
    )
    residual_rank: int = option(
        0, "rank of a low-rank summand; 0 leaves it to the budget", panel=METHOD, ge=0
    )
    keep: tuple[str, ...] = option(
        (),
        "layers left dense: names with `*`, or roles such as `down`; or `re:` and an expression, "
        "as in `layers[].match`",
        **_PATTERNS,
    )
    only: tuple[str, ...] = option(
        (), "layers to rewrite, and no others; as in `layers[].match`; default all", **_PATTERNS
    )
    layers: tuple[LayerRule, ...] = Field((), description="exceptions by layer")
    embeddings: Embeddings | None = Field(
        None, description="how the word embedding is rewritten; left as it is by default"
    )
    positions: Positions = option(
        "host",
        "what the table of positions holds; with `init: random` and `lprod`; the `host`'s own; "
        "sinusoids that are not trained, whose frequencies are scaled slice by slice (`standard`: "
        "all alike, `linear`, `exponential`, `harmonic`); `learned`: all of it is trained",
        panel=BLOCKS,
    )
    norm: Norm = option(
        "host",
        "what layer norms of blocks normalise; with `init: random` and `lprod`; all features "
        "(`host`), or each slice by itself (`tensor`)",
        panel=BLOCKS,
    )
    calibration: Calibration = Field(
        default_factory=_usual_calibration,
        description="calibration data; with `init: random` there is none",
        json_schema_extra={"default": Calibration().model_dump(mode="json")},
    )
    dtype: DType | None = option(
        None, "dtype of the output; default as the source", panel=OUTPUT, metavar="NAME"
    )
    bits: Literal[8, 4] | None = option(
        None,
        "bits that weights are stored in; on disk alone, since loading gives them their dtype back",
        panel=OUTPUT,
        metavar="8|4",
    )
    embedding_bits: Literal[8, 4, 3, "none"] | None = option(
        None,
        "the same of the word embedding and a head tied to it; default `bits`; under "
        "`target_bytes`, where data tells losses, bits and low rank are chosen",
        panel=OUTPUT,
        metavar="8|4|3|none",
    )
    group_size: int | None = option(
        None,
        "numbers that share a scale with 4 or 3 bits; default 32; with 8 bits it is a row",
        panel=OUTPUT,
        ge=8,
        le=4096,
    )
    device: Device = option("auto", DEVICES, panel=OUTPUT, metavar="NAME", complete="devices")
    max_shard_size: str = option(
        "2GB",
        "largest weight file of the output",
        panel=OUTPUT,
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?[KMG]i?B$",
        examples=["2GB", "500MB"],
    )

    @model_validator(mode="after")
    def _check(self) -> Convert:
        problems = [
            *self._init_problems(),
            *self._depth_problems(),
            *self._budget_problems(),
            *(self._plain_problems() if self.plain else ()),
            *self._storage_problems(),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _init_problems(self) -> Iterator[str]:
        if self.init == "random":
            yield from self._needs_trained_weights()
        lprod = getattr(self.method, "name", None) == "lprod"
        for name in ("positions", "norm"):
            value = getattr(self, name)
            if value != "host" and not (self.init == "random" and lprod):
                yield (
                    f"`{name}: {value}` is for models that are trained from scratch in slices: it "
                    "needs `init: random` and the method `lprod`"
                )

    def _needs_trained_weights(self) -> Iterator[str]:
        if not self.calibration.is_none:
            yield (
                f"`calibration` is {listed(self.calibration.source)}, but with `init: random` "
                "nothing is fitted: leave it out"
            )
        if self.adapter is not None:
            yield "`adapter` is merged into trained weights: with `init: random` leave it out"
        if isinstance(self.method, AutoSpec):
            yield "`auto` compares losses of trained weights: with `init: random` name a method"
        for name in DEPTH:
            if getattr(self, name) is not None:
                yield (
                    f"`{name}` picks blocks of a trained model: with `init: random` give the "
                    "number of blocks in the configuration"
                )
        for name in ERRORS:
            if getattr(self, name) is not None:
                yield f"`{name}` limits an error, and `init: random` has none: give a target"
        if tol_of(self.method) is not None:
            yield "`tol` limits an error, and `init: random` has none: give a rank or target"

    def _depth_problems(self) -> Iterator[str]:
        given = [name for name in DEPTH if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"`{given[0]}` and `{given[1]}` are both given; allowed is one"
        for name in ("attention_layers", "keep_layers", "drop_layers"):
            if getattr(self, name) in ((), {}):
                yield f"`{name}` is empty; allowed is to name blocks, or to leave it out"
        if self.attention_layers is not None and self.attention is None:
            yield "`attention_layers` needs `attention`, since it is about replacements"
        if self.method is None:
            scratch = self.init == "random"
            others = (self.changes_depth, self.embeddings, self.attention, self.vocab, self.rounds)
            if not (any(others) or scratch):
                yield "there is nothing to do: give `method`, `attention`, `keep_layers` or `bits`"
            alone = (*BUDGETS, *WIDTHS, "residual_rank", "keep", "only", "layers")
            given = [f"`{name}`" for name in alone if getattr(self, name)]
            if given:
                yield f"{', '.join(given)} needs a `method`, since it is about layers"

    def _budget_problems(self) -> Iterator[str]:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        fixed = self.method is not None and self.method.fixes_size
        if tol_of(self.method) is not None:
            given.append("tol")
        times = [name for name in given if name in RESOURCES]
        others = [name for name in given if name not in RESOURCES]
        for names in (times, others):
            if len(names) > 1:
                both = " and ".join(f"`{name}`" for name in names)
                yield f"{both} are given together; allowed is one of them"
        if times and others and others[0] not in SIZES:
            yield f"`{times[0]}` and `{others[0]}` are given together; allowed is one of them"
        if times and self.calibration.is_none:
            what = "time" if times[0] in TIMES else _LIMITS[times[0]].unit
            yield f"`{times[0]}` shares {what} out by what is lost: choose a calibration source"
        if times and self.init == "random":
            yield f"`{times[0]}` is about trained weights: with `init: random` give a target"
        if times and (self.chooses_depth or getattr(self.method, "shares_factors", False)):
            yield f"`{times[0]}` sizes layers one by one: give a target instead"
        if (self.at or self.threads) and not {*times} & {*TIMES} and self.max_loss is None:
            yield "`at` and `threads` say at which pass time counts: give `speedup` or `latency`"
        if self.max_loss is not None and self.calibration.is_none:
            yield "`max_loss` is measured on data: choose a calibration source"
        if self.max_loss is not None and self.rounds:
            yield (
                "`max_loss` is measured before weights are rounded to `bits` or `embedding_bits`, "
                "which loses more: leave one of them out, or give a target and heal"
            )
        if self.max_loss is not None and getattr(self.method, "shares_factors", False):
            yield "`max_loss` sizes layers one by one, but factors are shared: give a target"
        if given and fixed:
            yield TWO_SIZES.format(given[0])
        for name, parse in (("target_params", parameters_of), ("target_bytes", bytes_of)):
            value = getattr(self, name)
            if value is not None and parse(value) < 1:
                yield f"`{name}` is `{value}`, allowed is 1 or more"
        if self.latency is not None and milliseconds_of(self.latency) <= 0:
            yield f"`latency` is `{self.latency}`, allowed is more than `0ms`"
        if any(tol_of(rule.method) is not None for rule in self.layers):
            yield "`tol` is for all layers; rules in `layers` take a `rank` or `target`"
        if fixed and any(rule.target and rule.method is None for rule in self.layers):
            yield TWO_SIZES.format("layers[].target")
        if self.max_error is not None and self.method is not None and self.method.shares_factors:
            yield "`max_error` sizes layers one by one, but factors are shared: give a target"
        if self.chooses_depth and (self.method is None or not any(map(given.count, SIZES))):
            yield (
                "`drop_layers: auto` shares a budget between blocks and layers: give a `method` "
                "and a `target`, `target_params` or `target_bytes`"
            )
        if self.chooses_depth and self.calibration.is_none:
            yield "`drop_layers: auto` measures on data: choose a calibration source"
        if self.fixes_width and self.method is not None and self.method.shares_factors:
            yield "factors are shared between weights of all channels: give `share: none`"
        if self.fixes_width and (self._only_predicted or self.resource_budget):
            yield "`keep_neurons` and `head_size` leave nothing to such a budget: give a target"
        if self.fixes_width and self.init == "random":
            yield (
                "`keep_neurons` and `head_size` choose among trained channels: with `init: random` "
                "give widths in the configuration"
            )
        if isinstance(self.method, AutoSpec) and self.residual_rank:
            yield "`residual_rank` is chosen by `auto` itself: leave it out"

    def _storage_problems(self) -> Iterator[str]:
        if self.vocab is not None and self.init == "random":
            yield (
                "`vocab` leaves out tokens of a trained model: with `init: random` give "
                "`vocab_size` in the configuration"
            )
        elif self.vocab == "data" and not self.calibration.files:
            yield "`vocab: data` keeps what your data needs: give a calibration source of your own"
        if self.group_size is not None and not (self.rounds or self.chooses_table):
            yield "`group_size` is of weights in few bits: give `bits` or `embedding_bits` too"

    def _plain_problems(self) -> Iterator[str]:
        if self.method is not None and not self.method.narrows:
            yield (
                f"no model's own config can say `{self.method.name}`: with `plain` allowed are the "
                "method `width` and fewer blocks"
            )
        others = ("attention", "embeddings", "residual_rank", "layers", "max_error", "max_loss")
        given = [f"`{name}`" for name in others if getattr(self, name)]
        if given:
            names = ", ".join(given)
            yield f"with `plain` all layers are ordinary, and of one width: leave {names} out"
        if self.rounds:
            yield "fewer bits are read by tcompress alone: leave `plain` out, or the bits"
        if self.init == "random":
            yield "with `init: random` give widths in the configuration, in place of `plain`"
        if self.keep_neurons is not None and any(getattr(self, name) for name in SIZES):
            yield "`keep_neurons` and a target each set the one width: with `plain` allowed is one"

    @property
    def changes_depth(self) -> bool:
        """True if blocks are dropped, or put on top."""
        return any(getattr(self, name) is not None for name in DEPTH)

    @property
    def rounds(self) -> bool:
        """True if anything is stored in fewer bits."""
        return self.bits is not None or self.embedding_bits not in (None, "none")

    @property
    def chooses_depth(self) -> bool:
        """True if the number of dropped blocks is chosen too, under the budget."""
        return self.drop_layers == "auto"

    @property
    def tries_methods(self) -> bool:
        """True if methods are tried out under the budget, and measured on data held out."""
        tries = isinstance(self.method, AutoSpec) and self.method.trials
        sized = self.budget is not None and not self.budget.is_error
        return tries and sized and not self.calibration.is_none and self.init != "random"

    @property
    def fixes_width(self) -> bool:
        """True if numbers of channels are given, so that no budget chooses them."""
        return any(getattr(self, name) is not None for name in WIDTHS)

    @property
    def narrows(self) -> bool:
        """True if channels may become fewer, of which data tells the best."""
        return self.fixes_width or (self.method is not None and self.method.narrows)

    @property
    def label(self) -> str:
        """Name for people: replacement, method, `depth`, `embeddings`, or several."""
        words = [part.name for part in (self.attention, self.method) if part is not None]
        parts = {"depth": self.changes_depth, "embeddings": self.embeddings, "vocab": self.vocab}
        words += [word for word, present in parts.items() if present]
        return " + ".join((*words, *self.bit_words)) or "dense"

    @property
    def chooses_table(self) -> bool:
        """True if a budget of bytes chooses what becomes of the word embedding too."""
        free = self.embeddings is None and self.embedding_bits is None and self.init != "random"
        sized = self.target_bytes is not None and self.allocation == "loss"
        return free and sized and self.by_loss and not self.calibration.is_none

    @property
    def bit_words(self) -> list[str]:
        """Numbers of stored bits, such as `4bit`, or `8bit` and `words4bit`."""
        words = [] if self.bits is None else [f"{self.bits}bit"]
        own = self.embedding_bits
        return words if own in (None, self.bits) else [*words, f"words{own}bit"]

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
        """Limit on the size, or the error, if there is any; else on a resource."""
        tol = tol_of(self.method)
        by_tol = None if tol is None else Budget("tol", tol)
        first = self._first_budget(*reversed(SIZES), *ERRORS)
        return first or by_tol or self.resource_budget

    def _first_budget(self, *names: str) -> Budget | None:
        given = ((name, getattr(self, name)) for name in names)
        budgets = (Budget(n, _LIMITS[n].read(value)) for n, value in given if value is not None)
        return next(budgets, None)

    @property
    def speedups(self) -> tuple[float, ...]:
        """All speeds that are asked for, each of a model of its own."""
        if self.speedup is None:
            return ()
        return self.speedup if isinstance(self.speedup, tuple) else (self.speedup,)

    @property
    def counts_time(self) -> bool:
        """True if time is what is spent, or saved: candidates have to be timed."""
        return self.time_budget is not None or (self.max_loss is not None and self.at is not None)

    @property
    def resource_budget(self) -> Budget | None:
        """Limit on something that has to be measured, alone or beside a size."""
        return self._first_budget(*RESOURCES)

    @property
    def time_budget(self) -> Budget | None:
        """Limit on the time of a pass, alone or beside a size."""
        budget = self.resource_budget
        return budget if budget is not None and budget.kind in TIMES else None

    def with_target(self, target: float | None, method: Spec | None = None) -> Convert:
        """The same with a kept fraction in place of any other budget, and maybe another method."""
        own = method or self.method
        if own is not None and tol_of(own) is not None:
            own = own.model_copy(update={"tol": None})
        others = dict.fromkeys(BUDGETS, None)
        return self.model_copy(update={**others, "target": target, "method": own})

    @property
    def by_loss(self) -> bool:
        """True if sizes, or structures, follow predicted loss."""
        if self.budget is None or self.method is None or self.method.shares_factors:
            return False
        if self.fixes_width or self.plain:  # predictions are of whole layers
            return False
        return self._only_predicted or self._asks_for_loss

    @property
    def _only_predicted(self) -> bool:
        """True if nothing but a prediction can tell what layers become."""
        follows = self.resource_budget or (self.budget is not None and self.budget.is_error)
        return bool(follows) or isinstance(self.method, AutoSpec)

    @property
    def _asks_for_loss(self) -> bool:
        asked = self.budget is not None and (self._only_predicted or self.allocation == "loss")
        return asked and not self.calibration.is_none

    @property
    def measures_sensitivity(self) -> bool:
        """True if a conversion begins with a backward pass over the calibration data."""
        if self.calibration.is_none:
            return False
        weighs = self.calibration.output_moments
        if self.narrows:
            return True
        return self.by_loss or (self._asks_for_loss if weighs is None else weighs)


_LIMITS: dict[str, Limit] = {
    name: limit
    for name, field in Convert.model_fields.items()
    if (limit := getattr(field.json_schema_extra, "limits", None)) is not None
}
LIMITS.update(_LIMITS)
SIZES, RESOURCES, ERRORS = (
    tuple(name for name, limit in _LIMITS.items() if limit.what == what)
    for what in ("size", "resource", "error")
)
TIMES = tuple(name for name in RESOURCES if _LIMITS[name].unit == "nanoseconds")
BUDGETS = (*SIZES, *RESOURCES, *ERRORS)
"""Fields that say how large or slow a model may be, or what it may lose."""
