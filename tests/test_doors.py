"""Converted models in what users put them into: compilers, pipelines, PEFT and lm-eval.

`lm-eval` and `peft` are skipped where they are not installed; CONTRIBUTING.md says how they are.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tcompress
from tests.support.cli import completed
from tests.support.conversions import Made, distance, make, outputs
from tests.support.evaluation import classifier, encoder
from tests.support.model_folders import save_tokenizer, sentences
from tests.support.tiny import TINY, build

pytestmark = [
    pytest.mark.doors,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # those libraries warn of each other
]
STRUCTURES = {"svd": "svd", "lprod": "dct", "tt": "tt", "tucker": "tucker", "width": "width"}
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


@pytest.fixture(params=STRUCTURES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return make("bert", tmp_path, STRUCTURES[request.param])


# torch.compile and torch.export


def test_a_compiled_model_is_one_graph(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model, inputs = made.load().eval(), made.inputs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = "inductor" if COMPILER else "aot_eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert distance(outputs(compiled, inputs), outputs(model, inputs)) <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


_RUN = """
import sys, torch, transformers.modeling_outputs
program, cases = torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2])
with torch.no_grad():
    torch.save([program(**inputs).logits for inputs in cases], sys.argv[3])
assert "tcompress" not in sys.modules
"""


def test_an_exported_program_takes_any_shape(made: Made, tmp_path: Path) -> None:
    """And needs no tcompress."""
    model, inputs = made.load().eval(), made.inputs()
    axes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2, max=64)}
    shapes = dict.fromkeys(inputs, axes)
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    cases = [TINY["bert"].inputs(*shape, seed=7) for shape in ((3, 5), (5, 33))]
    files = [tmp_path / name for name in ("model.pt2", "inputs.pt", "outputs.pt")]
    torch.export.save(program, files[0])
    torch.save(cases, files[1])
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, files)],
        env=clean, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for inputs, logits in zip(cases, torch.load(files[2]), strict=True):
        assert distance([logits], outputs(model, inputs)) <= 1e-5


# Pipelines of Transformers

TEXTS = sentences(6)
DATA_FREE: dict[str, Any] = {"calibration": "none"}


def _opened(kind: str, folder: Path) -> tuple[Any, Any]:
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_features_are_those_of_the_model(tmp_path: Path) -> None:
    dense, small = encoder(tmp_path / "dense"), tmp_path / "small"
    tcompress.convert(dense, output=small, method="lprod", p=4, **DATA_FREE)
    extract = transformers.pipeline("feature-extraction", model=str(small), device="cpu")
    model, tokenizer = _opened("AutoModel", small)
    for text, features in zip(TEXTS, extract(TEXTS), strict=True):
        (expected, *_) = outputs(model, tokenizer(text, return_tensors="pt"))
        assert distance([torch.tensor(features)], [expected]) <= 1e-5


def test_labels_are_those_of_the_model(tmp_path: Path) -> None:
    dense, small = classifier(tmp_path / "dense", ["sad", "so so", "glad"]), tmp_path / "small"
    tcompress.convert(dense, output=small, method="width", target=0.75, **DATA_FREE)
    classify = transformers.pipeline("text-classification", model=str(small), device="cpu")
    model, tokenizer = _opened("AutoModelForSequenceClassification", small)
    for text, scores in zip(TEXTS, classify(TEXTS, top_k=None, batch_size=4), strict=True):
        (logits,) = outputs(model, tokenizer(text, return_tensors="pt"))
        expected = dict(zip(["sad", "so so", "glad"], logits[0].softmax(-1).tolist(), strict=True))
        got = {row["label"]: row["score"] for row in scores}
        assert got == pytest.approx(expected, abs=1e-5)


def _language_model(folder: Path) -> Path:
    build("llama").save_pretrained(folder)
    save_tokenizer(folder, start=False)
    return folder


def test_text_is_that_of_the_model(tmp_path: Path) -> None:
    dense, small = _language_model(tmp_path / "dense"), tmp_path / "small"
    tcompress.convert(dense, output=small, method="svd", target=0.5, **DATA_FREE)
    write = transformers.pipeline("text-generation", model=str(small), device="cpu")
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0}
    model, tokenizer = _opened("AutoModelForCausalLM", small)
    for text in TEXTS:
        transformers.set_seed(1)
        (expected,) = model.generate(**tokenizer(text, return_tensors="pt"), **options)
        transformers.set_seed(1)
        (got,) = write(text, return_tensors=True, **options)
        assert got["generated_token_ids"] == expected.tolist()


# PEFT

ADAPTED = {
    # What LoRA is put on: layers by name where they are plain, the tensors of structures elsewhere.
    "svd": {"target_parameters": ["q_proj.tc_a", "q_proj.tc_b", "down_proj.tc_a"]},
    "dct": {"target_parameters": ["q_proj.tc_slices", "v_proj.tc_slices", "down_proj.tc_slices"]},
    "tucker": {"target_parameters": ["q_proj.tc_u", "down_proj.tc_core"]},
    "tt": {"target_modules": ["lm_head"]},
    "width": {"target_modules": ["q_proj"], "target_parameters": ["down_proj.tc_w"]},
}


@pytest.mark.parametrize("option", ADAPTED)
def test_lora_is_trained_and_merged(option: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    made = make("llama", tmp_path, option)
    ids, inputs = made.inputs(seed=3)["input_ids"], made.inputs(seed=4)
    base = outputs(made.load(), inputs)
    targets = {"target_modules": [], **ADAPTED[option]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = peft.get_peft_model(made.load(), peft.LoraConfig(r=2, lora_alpha=8, **targets))
    names = [name for name, tensor in adapted.named_parameters() if tensor.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    losses = _trained(adapted.train(), ids)
    assert losses[-1] < losses[0] - 0.05
    expected = outputs(adapted.eval(), inputs)
    assert distance(expected, base) > 1e-2
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(made.load(), str(tmp_path / "adapter"))
    assert distance(outputs(again.eval(), inputs), expected) <= 1e-5
    merged = again.merge_and_unload()
    assert distance(outputs(merged, inputs), expected) <= 1e-5
    merged.save_pretrained(tmp_path / "merged")
    assert distance(outputs(made.load(tmp_path / "merged"), inputs), expected) <= 1e-5


def _trained(model: Any, ids: Tensor) -> list[float]:
    """Learns one batch by heart."""
    learnt = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.Adam(learnt, lr=0.02)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_kept_weights_follow_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    made = make("llama", tmp_path, "svd")
    inputs, config = made.inputs(), {"r": 2, "init_lora_weights": False, "target_modules": []}
    lora = peft.LoraConfig(**config, target_parameters=["q_proj.tc_a"])
    adapted = peft.get_peft_model(made.load(), lora).eval()
    expected = outputs(adapted, inputs)
    with adapted.disable_adapter():
        base = outputs(adapted, inputs)
    assert distance(base, expected) > 1e-2
    tcompress.keep_weights(adapted)
    for _ in range(2):
        assert distance(outputs(adapted, inputs), expected) <= 1e-5
        with adapted.disable_adapter():
            assert distance(outputs(adapted, inputs), base) <= 1e-5


# lm-evaluation-harness

_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
"""
_TEXT = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
_CHOICE = """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
CHOICES = ["w30 w31", "w40 w41 w42", "a fox"]


def _log_likelihood(model: Any, context: list[int], rest: list[int]) -> float:
    (logits, *_) = outputs(model, {"input_ids": torch.tensor([context + rest])})
    rows = logits[0, len(context) - 1 : -1].double().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(rest)[:, None]).sum())


def _by_hand(folder: Path) -> tuple[list[float], list[list[float]]]:
    """Log likelihoods of all texts, and of the choices after each."""
    model, tokenizer = _opened("AutoModelForCausalLM", folder)
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    rest = [tokenizer(choice)["input_ids"] for choice in CHOICES]
    return (
        [_log_likelihood(model, [tokenizer.eos_token_id], ids) for ids in texts],
        [[_log_likelihood(model, ids, choice) for choice in rest] for ids in texts],
    )


@pytest.mark.skipif(not find_spec("lm_eval"), reason="lm-evaluation-harness is not installed")
def test_lm_eval_measures_a_converted_model(tmp_path: Path) -> None:
    dense, small = _language_model(tmp_path / "dense"), tmp_path / "small"
    tcompress.convert(dense, output=small, method="svd", target=0.5, **DATA_FREE)
    rows = tmp_path / "rows.jsonl"
    content = [{"text": text, "choices": CHOICES, "label": n % 3} for n, text in enumerate(TEXTS)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in content))
    for name, task in (("texts", _TEXT), ("choices", _CHOICE)):
        head = _TASK.format(name=name, rows=rows, cache=tmp_path / "cache")
        (tmp_path / f"{name}.yaml").write_text(head + task)
    completed(
        "lm-eval", "run", "--model", "hf", "--model_args", f"pretrained={small}", "--tasks",
        "texts,choices", "--include_path", tmp_path, "--device", "cpu", "--batch_size", "4",
        "--output_path", tmp_path / "out", "--log_samples",
    )  # fmt: skip
    samples = {}
    for name in ("texts", "choices"):
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = [row["resps"] for row in sorted(lines, key=lambda row: row["doc_id"])]
    texts, choices = _by_hand(small)
    theirs = [float(resps[0][0]) for resps in samples["texts"]]
    assert theirs == pytest.approx(texts, abs=1e-3)
    assert theirs != pytest.approx(_by_hand(dense)[0], abs=0.1)
    for resps, expected in zip(samples["choices"], choices, strict=True):
        assert [float(resp[0][0]) for resp in resps] == pytest.approx(expected, abs=1e-3)
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    size = sum(len(text.encode()) for text in TEXTS)
    bits = -sum(texts) / size / torch.tensor(2.0).log().item()
    assert results["texts"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-4)
    right = [max(range(3), key=row.__getitem__) == n % 3 for n, row in enumerate(choices)]
    assert results["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
