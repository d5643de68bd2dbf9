"""Rewritten word embeddings: lookups, tied heads, fits, files."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import tcompress
from tcompress.artifact.reader import Artifact
from tcompress.blockwise import sensitivity
from tcompress.cli.convert import default_output
from tcompress.conversion import model_fits
from tcompress.conversion.converter import convert
from tcompress.errors import PlanError, SourceError
from tcompress.exports.dense import export_dense
from tcompress.fitting.embeddings import EMBEDDINGS, count_words, fit_table, frequencies
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tcompress.structures import Site, structure
from tcompress.structures.base import LooksUp
from tcompress.structures.flops import lookup_macs
from tcompress.structures.modules.embedding import LookupScale, StructuredEmbedding, TiedTable
from tcompress.structures.modules.linear import PartLayout
from tests.support.cli import completed
from tests.support.conversions import (
    assert_same_from_disk,
    assert_same_without_a_cache,
    assert_wired,
    calibration,
    distance,
    load_whole,
    make,
    outputs,
)
from tests.support.model_folders import save_tokenizer
from tests.support.numerics import alike
from tests.support.structure_cases import Case, marked_cases
from tests.support.structures import fill_random, make_layer, randn, reference_of
from tests.support.tiny import TINY, VOCAB, build
from tests.support.training import texts, train
from tests.support.typed import conversion

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": {"name": "svd"}, "target": 0.5},
    "tt": {"method": {"name": "tt"}, "target": 0.5},
    "qtt": {"method": {"name": "qtt", "rank": 4}},
    "tucker": {"method": {"name": "tucker"}, "target": 0.5},
}
ALONE: dict[str, Any] = {"method": None, "target": None}

# What each family ties to its table: a head with a bias, without one, none, other tables.
TABLES = {
    "bert": 1, "roberta": 1, "distilbert": 1, "electra": 1, "mpnet": 1, "modernbert": 1,
    "gpt2": 1, "gpt_neox": 0, "opt": 1, "llama": 0, "qwen3": 0, "t5": 3, "clip": 0,
    "bart": 3, "gemma3": 1,
}  # fmt: skip


def recipe(**changes: Any) -> Convert:
    """A recipe that rewrites the table, and nothing else unless asked to."""
    return Convert.model_validate({**ALONE, "embeddings": METHODS["svd"], **changes})


def made(family: str, folder: Path, table: str = "svd", *, aware: bool = False, **more: Any) -> Any:
    options = {**ALONE, "embeddings": METHODS[table], **more}
    return make(family, folder, aware=aware, **options)


def tables(model: nn.Module) -> list[StructuredEmbedding]:
    return [module for module in model.modules() if isinstance(module, StructuredEmbedding)]


# ---------------------------------------------------------------- the module
def _looks_up(case: Case) -> bool:
    layout = case.layout()
    kind = structure(layout.structure)
    return isinstance(kind, LooksUp) and kind.looks_up(layout)


@pytest.mark.parametrize("case", marked_cases(_looks_up), ids=str)
def test_rows_are_those_of_the_dense_weight(case: Case) -> None:
    layout = case.layout()
    kind = structure(layout.structure)
    layer = make_layer(layout)
    index = torch.tensor([3, 0, layout.out_features - 1, 3])
    tensors = {name: tensor.double() for name, tensor in layer._tensors(0, 0).items()}
    assert isinstance(kind, LooksUp)
    found = kind.rows(index, tensors, layout)
    assert_close(found, reference_of(layer)[index].double(), rtol=1e-5, atol=1e-6)
    assert kind.rows(index[:0], tensors, layout).shape == (0, layout.in_features)
    with FlopCounterMode(display=False) as counted:
        kind.rows(torch.tensor([3]), tensors, layout)
    assert counted.get_total_flops() == 2 * lookup_macs(layout)
    scales = torch.rand(layout.out_features, dtype=torch.float64) + 0.5
    scaled = kind.scale_rows(tensors, scales, layout)
    if scaled is not None:
        dense = kind.dense(tensors, layout)
        assert_close(kind.dense(scaled, layout), dense * scales[:, None])


def _table(method: str = "svd") -> StructuredEmbedding:
    kind = structure("lowrank" if method == "svd" else method)
    layout = kind.layout(kind.spec(), Site(12, 30, "both"), 150)
    table = StructuredEmbedding([PartLayout(name="embedding", terms=(layout,))], padding_idx=0)
    fill_random(table)
    return table


@pytest.mark.parametrize("method", ["svd", "tt", "tucker"])
def test_a_table_looks_words_up_and_scores_vectors(method: str) -> None:
    table = _table(method)
    dense = table.dense_weight(torch.float32)
    ids = torch.tensor([[1, 2, 29], [2, 2, 0]])
    assert_close(table(ids), dense[ids])
    x = randn(4, 12).float()
    assert_close(table(x), x @ dense.mT, rtol=1e-4, atol=1e-5)
    assert (table.num_embeddings, table.embedding_dim, table.padding_idx) == (30, 12, 0)


@pytest.mark.parametrize("method", ["svd", "tt", "tucker"])
def test_lookups_train_the_tensors(method: str) -> None:
    table = _table(method).double()
    ids = torch.tensor([1, 5, 5])
    names = [name for name, _ in table.named_parameters()]

    def looked_up(*tensors: Tensor) -> Tensor:
        swapped = dict(zip(names, tensors, strict=True))
        return torch.func.functional_call(table, swapped, (ids,))

    start = [tensor.detach().clone().requires_grad_() for tensor in table.parameters()]
    assert torch.autograd.gradcheck(looked_up, start)


def test_a_kept_weight_serves_lookups() -> None:
    table = _table().eval()
    ids = torch.tensor([4, 7])
    with torch.no_grad():
        before = table(ids)
        assert tcompress.keep_weights(table) == 30 * 12 * 4
        assert_close(table(ids), before)


def test_autocast_leaves_the_dtype_of_lookups() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _table()(torch.tensor([1])).dtype == torch.float32


def test_each_host_scales_its_own_lookups_and_no_scores() -> None:
    owner, ids, vectors = _table(), torch.tensor([1, 5]), randn(2, 12).float()
    tied = TiedTable(owner, BartScaledWordEmbedding(30, 12, 0, embed_scale=3.0))
    assert_close(tied(ids), 3 * owner(ids))
    assert_close(tied(vectors), owner(vectors))
    rounded = LookupScale.of(Gemma3TextScaledWordEmbedding(30, 12, 0, embed_scale=12**0.5))
    half = torch.ones(1, dtype=torch.bfloat16)
    assert rounded(half) == torch.tensor(12**0.5).bfloat16()


# ---------------------------------------------------------------- whole models
@pytest.mark.often("llama-svd", "bert-tt", "gpt2-svd", "t5-tucker")
@pytest.mark.parametrize(("family", "method"), [*product(TABLES, METHODS)])
def test_families_load_with_a_rewritten_table(family: str, method: str, tmp_path: Path) -> None:
    found = made(family, tmp_path, method)
    model = assert_wired(found)
    assert len(tables(model)) == 1
    ties = [module for module in model.modules() if isinstance(module, TiedTable)]
    assert len(ties) == TABLES[family]
    assert (found.plan.layers, found.plan.kept) == ((), 1.0)
    assert sum(p.numel() for p in model.parameters()) == found.plan.parameters - found.plan.saved


@pytest.mark.often("opt")
@pytest.mark.parametrize("family", ["bert", "opt", "t5", "gemma3"])
def test_saved_again_trained_and_exported(family: str, tmp_path: Path) -> None:
    found = made(family, tmp_path, aware=True, method={"name": "svd"}, target=0.5)
    model, inputs = found.load(), found.inputs()
    before = outputs(model, inputs)
    model.save_pretrained(tmp_path / "again")
    again = load_whole(type(found.dense), tmp_path / "again")
    assert distance(outputs(again, inputs), before) == 0.0
    plain = found.load(export_dense(found.folder, tmp_path / "plain"))
    assert distance(outputs(plain, inputs), before) <= 1e-4
    assert not tables(plain)
    model.train()
    model(**inputs).logits.square().mean().backward()
    (table,) = tables(model)
    assert all(p.grad is not None and bool(p.grad.any()) for p in table.parameters())


def test_a_model_of_another_head_loads(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification, BertModel

    found = made("bert", tmp_path)
    own = found.load().bert
    body = BertModel.from_pretrained(found.folder)
    ids = found.inputs()["input_ids"]
    assert_close(body(input_ids=ids)[0], own(input_ids=ids)[0])
    assert len(tables(BertForSequenceClassification.from_pretrained(found.folder))) == 1
    body.save_pretrained(tmp_path / "body")
    with_head, info = type(found.dense).from_pretrained(tmp_path / "body", output_loading_info=True)
    assert_close(with_head.bert(input_ids=ids)[0], own(input_ids=ids)[0])
    assert not any(
        "word_embeddings" in name or "decoder.weight" in name for name in info["missing_keys"]
    )


def test_ties_are_gone_for_good(tmp_path: Path) -> None:
    model: Any = made("bert", tmp_path).load()
    inputs = TINY["bert"].inputs(2, 8, 3)
    before = outputs(model, inputs)
    model.tie_weights()  # users and trainers call it
    assert distance(outputs(model, inputs), before) == 0.0
    moved = copy.deepcopy(model).to(torch.bfloat16)
    assert moved(**inputs).logits.dtype == torch.bfloat16


def test_text_is_generated_with_a_cache_as_without(tmp_path: Path) -> None:
    ids = TINY["opt"].inputs(1, 6, 1)["input_ids"]
    assert_same_without_a_cache(made("opt", tmp_path).load(), ids)


@pytest.mark.parametrize("on_disk", ["model.decoder.embed_tokens", "lm_head", "model.decoder"])
def test_disk_offload_gives_the_same(on_disk: str, tmp_path: Path) -> None:
    assert_same_from_disk(made("opt", tmp_path), [on_disk], tmp_path / "offload")


# ---------------------------------------------------------------- the fit
def test_words_that_occur_count_more(tmp_path: Path) -> None:
    """Only a third of the words occur; their vectors are kept better than without data."""
    data = calibration("bert")
    for batch in data.batches:
        batch["input_ids"] = batch["input_ids"] % 33
    dense, errors = build("bert"), []
    dense.save_pretrained(tmp_path / "dense")
    for name, source in (("free", "none"), ("aware", "builtin")):
        chosen = recipe(calibration={"source": source})
        folder = convert(
            str(tmp_path / "dense"), chosen, tmp_path / name, data=data if name == "aware" else None
        ).folder
        weight = dense.get_submodule(Artifact.open(folder).layers[0].name).weight
        (table,) = tables(type(dense).from_pretrained(folder))
        wrong = (table.dense_weight() - weight).square().sum(1).detach()
        errors.append(float(wrong @ count_words(data, VOCAB, held_out=True)))
    assert errors[1] < 0.9 * errors[0]


def test_the_fit_is_the_best_of_its_rank_in_the_norm_of_frequencies(
    sources: Callable[[str], SourceModel],
) -> None:
    (entry,) = make_plan(recipe(), sources("bert")).embeddings
    weight, counts = randn(VOCAB, 32, seed=1), torch.arange(VOCAB).double()
    fitted = fit_table(entry, weight, counts, counts, torch.float64)
    scales = frequencies(counts).sqrt()[:, None]
    rank = entry.parts[0].terms[0].rank  # type: ignore[attr-defined]
    tail = torch.linalg.svdvals(weight.double() * scales)[rank:].square().sum()
    wrong = weight - fitted.tensors["tc_a"] @ fitted.tensors["tc_b"]
    assert float((wrong * scales).square().sum()) == pytest.approx(float(tail), rel=1e-6)
    norm = (weight * scales).square().sum()
    assert fitted.errors["calibration"] == pytest.approx(float(tail / norm), rel=1e-6)


def test_words_never_seen_get_the_share_of_words_seen_once() -> None:
    """Good and Turing: 2 of 10 words read occurred once, so 0.2 of a text is spread over all 8."""
    found = frequencies(torch.tensor([3.0, 5.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    wanted = [0.8 * share + 0.025 for share in (0.3, 0.5, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0)]
    assert found.tolist() == pytest.approx(wanted)
    assert torch.equal(frequencies(torch.zeros(4)), torch.full((4,), 0.25))
    assert frequencies(torch.full((4,), 5.0)).min() > 0  # where no word was seen once


def test_counts_leave_padding_and_held_out_data_out() -> None:
    data = calibration("bert")
    counts = [count_words(data, VOCAB, held_out=held) for held in (False, True)]
    kept = [int(batch["attention_mask"].sum()) for batch in data.batches]
    assert [int(found.sum()) for found in counts] == [sum(kept[:-1]), kept[-1]]
    assert counts[0][0] == 0  # padding


def test_layers_are_fitted_to_what_the_rewritten_table_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shift of the first bias makes up for the means of both sides of the fit."""
    monkeypatch.setattr(sensitivity, "token_weights", alike)
    small = {"method": {"name": "svd"}, "target": 0.1}
    found = make("bert", tmp_path, "svd", aware=True, embeddings=small)
    dense: Any = found.dense
    model: Any = found.load()
    data = calibration("bert")
    means = []
    for host in (dense, model):
        rows = []
        for batch in data.batches[:-1]:
            states = host.bert.embeddings(input_ids=batch["input_ids"])
            rows.append(states[batch["attention_mask"].bool()].detach())
        means.append(torch.cat(rows).double().mean(0))
    name = "bert.encoder.layer.0.attention.self.query"
    old, new = (host.get_submodule(name) for host in (dense, model))
    wanted = old.bias + old.weight.double() @ means[0] - new.dense_weight() @ means[1]
    assert_close(new.bias.double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    assert float((means[0] - means[1]).norm()) > 0.1 * float(means[0].norm())


def test_an_interrupted_conversion_keeps_the_table(
    sources: Callable[[str], SourceModel], tmp_path: Path, monkeypatch: Any
) -> None:
    asked = (sources("bert"), recipe(method={"name": "svd"}, target=0.5), tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(model_fits.BlockFitter, "run", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(*asked, data=calibration("bert"))
    monkeypatch.setattr(model_fits, "fit_table", None)  # nothing is fitted again
    done = convert(*asked, data=calibration("bert"))
    assert done.resumed
    assert EMBEDDINGS not in {entry.block for entry in done.manifest.plan.layers}


# ---------------------------------------------------------------- heads that are stored twice
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("aware", [True, False])
def test_a_tied_head_that_is_stored_too(same: bool, aware: bool, tmp_path: Path) -> None:
    build("opt").save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.decoder.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head if same else head + 1}, file, {"format": "pt"})
    chosen = recipe(calibration={"source": "builtin" if aware else "none"})
    data = calibration("opt") if aware else None
    if same:
        folder = convert(str(tmp_path / "dense"), chosen, tmp_path / "out", data=data).folder
        stored = load_file(folder / "model.safetensors")
        assert "lm_head.weight" not in stored
        return
    said = r"(?s)stores both, and they differ.*hint: .*tie_word_embeddings"
    with pytest.raises(SourceError, match=said):
        convert(str(tmp_path / "dense"), chosen, tmp_path / "out", data=data)
    assert not (tmp_path / "out").exists()


# Rewritten word embeddings: refusals, options, reports, the command line, healing
@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        ({"method": {"name": "svd", "rank": 32}}, "it would not shrink"),
        ({"method": {"name": "svd"}, "target": 0.001}, "does not pay for rank 1"),
    ],
)
def test_refusals(embeddings: Any, message: str, sources: Callable[[str], SourceModel]) -> None:
    with pytest.raises(PlanError, match=rf"(?s){message}.*hint: .*leave `embeddings` out"):
        make_plan(recipe(embeddings=embeddings), sources("bert"))


def test_an_embedding_that_computes_more_is_refused(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))

    class Normed(nn.Embedding):
        pass

    source.keymap.model.get_submodule("bert.embeddings.word_embeddings").__class__ = Normed
    with pytest.raises(PlanError, match="`Normed` computes more than a table does"):
        make_plan(recipe(), source)


RANKED = {"method": {"name": "svd", "rank": 4}}


@pytest.mark.parametrize(
    ("given", "table", "wanted"),
    [
        ({"embeddings": "svd"}, None, ("svd", None, 0.25, None)),
        ({"embeddings": "svd", "target": 0.4}, None, ("svd", None, 0.4, "svd")),
        ({"embeddings": "tt", "embedding_target": 0.3, "method": "svd", "target": 0.5}, None,
         ("tt", None, 0.3, "svd")),
        # A target takes the place of the rank of a recipe, and `none` that of its embeddings.
        ({"embedding_target": 0.3}, RANKED, ("svd", None, 0.3, None)),
        ({"embeddings": "none", "method": "svd", "target": 0.5}, RANKED, (None, "svd")),
    ],
)  # fmt: skip
def test_options(given: dict[str, Any], table: Any, wanted: tuple[Any, ...]) -> None:
    said: Any = SimpleNamespace(convert=Convert(embeddings=table)) if table else None
    made = conversion(given, said)
    method = None if made.method is None else made.method.name
    if made.embeddings is None:
        assert (None, method) == wanted
    else:
        own = made.embeddings.method
        rank = getattr(own, "rank", None)
        assert (own.name, rank, made.embeddings.target, method) == wanted


def test_names_and_labels() -> None:
    made = conversion({"embeddings": "svd", "target": 0.4, "method": "svd"})
    assert made.label == "svd + embeddings"
    assert default_output("models/tiny", made) == "tiny-svd-40-words40"


def test_the_report_counts_the_table_apart(tmp_path: Path) -> None:
    found = made("opt", tmp_path, method={"name": "svd"}, target=0.5)
    parts = report_of(str(found.folder)).parameters
    (entry,) = found.plan.embeddings
    assert (
        parts.embeddings.dense - parts.embeddings.now == entry.dense_parameters - entry.parameters
    )
    assert parts.rewritten.now == found.plan.structured_rewritten
    assert parts.total.now == sum(p.numel() for p in found.load().parameters())
    macs = report_of(str(found.folder), length=8).macs_per_token
    other = make("opt", tmp_path / "other", "svd", target=0.5)
    plain = report_of(str(other.folder), length=8).macs_per_token
    assert macs.dense == plain.dense
    head = entry.dense_parameters - entry.macs(8) // 8
    assert plain.now - macs.now == head - entry.row_macs  # the tied head, and a lookup


def test_a_dry_run_names_the_table(tiny: Callable[[str], Path]) -> None:
    free = ("--embeddings", "svd", "--calib", "none")
    assert "word embedding" in completed("convert", tiny("bert"), *free, "--dry-run").out


@pytest.mark.slow
def test_healing_trains_the_table(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    chosen = recipe(calibration={"source": "none"})
    folder = convert(str(tmp_path / "dense"), chosen, tmp_path / "small").folder
    done = train(folder, tmp_path / "healed", data=texts(tmp_path), steps=12, learning_rate=3e-3)
    curve = [point.validation for point in done.facts.curve]
    assert min(curve[1:]) < curve[0]
    one, two = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "healed"))
    assert any("word_embeddings.tc_" in key and not torch.equal(one[key], two[key]) for key in one)
