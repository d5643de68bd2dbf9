"""What a converted model can do once it is loaded: all that a dense one can."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from transformers import BertModel, BertPreTrainedModel, Trainer, TrainingArguments

from tcompress.artifact.reader import Artifact
from tcompress.conversion.converter import convert
from tcompress.models.names import METHODS
from tcompress.options import Convert
from tcompress.project import INSTALL
from tests.support.conversions import (
    OPTIONS,
    Made,
    assert_same_from_disk,
    assert_same_without_a_cache,
    dense_weight,
    densified,
    distance,
    load_whole,
    make,
    outputs,
    recipe,
    structured,
)
from tests.support.model_folders import edited
from tests.support.tiny import TINY, build

Models = Callable[[str, str], Made]
TRY = """
import sys
from transformers import AutoModel

for folder in sys.argv[1:]:
    try:
        AutoModel.from_pretrained(folder)
    except Exception as error:
        print("refused:", type(error).__name__)
    else:
        print("loaded")
import tcompress

for folder in sys.argv[1:]:
    AutoModel.from_pretrained(folder)
print("all loaded")
"""


@pytest.mark.slow
def test_without_tcompress_loading_fails(models: Models) -> None:
    """Of linear and Conv1D layers, experts, and layers of which another model has only some."""
    folders = [models(family, "dct").folder for family in ("bert", "gpt2", "mixtral", "t5")]
    ran = subprocess.run(
        [sys.executable, "-c", TRY, *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert len(lines) == 5
    assert all(line.startswith("refused:") for line in lines[:4]), lines
    assert lines[4] == "all loaded"


@pytest.mark.slow
def test_without_tcompress_the_first_line_says_what_to_do(models: Models, tmp_path: Path) -> None:
    """Also of a model that was saved again, with and without the package being installed."""
    made = models("bert", "dct")
    made.load().save_pretrained(tmp_path / "again")
    plain = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
    hidden = f"import sys; sys.modules['tcompress'] = None; {plain}"
    silenced = "TRANSFORMERS_VERBOSITY"  # what a command of another test may have set
    own = {name: value for name, value in os.environ.items() if name != silenced}
    for folder, code in [(made.folder, hidden), (tmp_path / "again", plain)]:
        command = [sys.executable, "-c", code, folder]
        ran = subprocess.run(command, capture_output=True, text=True, env=own)
        assert ran.returncode
        # The first line of Transformers: other libraries may have warned of something before.
        said = next(line for line in ran.stderr.splitlines() if "quantization" in line)
        assert (
            f"Unknown quantization type, got tcompress (`{INSTALL}`, then `import "
            "tcompress` before `from_pretrained`; or write a dense copy: `tcompress export MODEL "
            "--to dense`) - supported types"
        ) in said


@pytest.mark.parametrize("name", METHODS[:-1])
def test_a_model_with_an_earlier_name_of_the_method_loads(
    models: Models, tmp_path: Path, name: str
) -> None:
    """As they were written before the name said what to do, or named a package index."""
    made = models("bert", "dct")
    folder = Path(shutil.copytree(made.folder, tmp_path / "older"))
    (folder / "tcompress.json").unlink()
    with edited(folder / "config.json") as config:
        config["quantization_config"]["quant_method"] = name
    assert len(Artifact.open(folder).layers) == len(made.plan.layers)
    found = type(made.load()).from_pretrained(folder)
    assert distance(outputs(found, made.inputs()), outputs(made.load(), made.inputs())) == 0


@pytest.mark.often("bert-tucker-model-cpu_offload")
@pytest.mark.parametrize(
    ("family", "option", "place"),
    [
        ("bert", "fitted", "auto"),
        ("bert", "tucker-model", "auto"),
        ("llama", "fitted", {"": "cpu"}),
        ("mixtral", "residual", "cpu"),
        ("bert", "fitted", "disk_offload"),
        ("llama", "fitted", "cpu_offload"),
        ("mixtral", "fitted", "disk_offload"),
        ("gpt2", "svd", "cpu_offload"),
        ("bert", "tucker-model", "cpu_offload"),
    ],
)
def test_device_map_and_offload(
    family: str, option: str, place: Any, models: Models, tmp_path: Path
) -> None:
    made = models(family, option)
    if "offload" in place:
        model = made.load()
        files = [tmp_path] if place == "disk_offload" else []
        getattr(accelerate, place)(model, *files, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
    else:
        model = made.load(device_map=place)
    wanted = outputs(made.load(), made.inputs())
    for _ in range(2):
        assert distance(outputs(model, made.inputs()), wanted) <= 1e-6


OFFLOADED = [
    ("bert", "fitted", r"bert.encoder.layer.1"),
    ("llama", "fitted", r"model.layers.1"),
    ("llama", "residual", r"model.layers.0"),
    ("gpt2", "tubal_rank", r"transformer.h.1"),
    ("mixtral", "fitted", r"model.layers.1"),
    ("t5", "svd", r"decoder.block.0"),
    ("bert", "tucker-model", r"bert.encoder.layer.0"),  # owns what the other block borrows
    ("bert", "tucker-model", r"bert.encoder.layer.1"),
]


@pytest.mark.often("bert-tucker-model-bert.encoder.layer.1")
@pytest.mark.parametrize(("family", "option", "block"), OFFLOADED)
def test_a_block_on_disk(
    family: str, option: str, block: str, models: Models, tmp_path: Path
) -> None:
    model = assert_same_from_disk(models(family, option), [block], tmp_path)
    assert {parameter.device.type for parameter in model.get_submodule(block).parameters()} == {
        "meta"
    }


@pytest.mark.parametrize("owner_on_disk", [True, False])
def test_a_shared_input_side_on_disk(owner_on_disk: bool, models: Models, tmp_path: Path) -> None:
    """Layers on one device read an input side that belongs to a layer on another."""
    made = models("llama", "fitted")
    owner = next(layer.name for layer in made.plan.layers if layer.readers == 3)
    readers = [layer.name for layer in made.plan.layers if layer.input_of == owner]
    assert len(readers) == 2
    assert_same_from_disk(made, [owner] if owner_on_disk else readers, tmp_path)


LOW = {torch.float16: 0.05, torch.bfloat16: 0.3}  # results are of size 3
CAST = [
    ("bert", "dct"), ("llama", "fitted"), ("gpt2", "residual"), ("gemma3", "dft"),
    ("mixtral", "tubal_rank"), ("t5", "svd"), ("vit", "fitted"), ("whisper", "dct"),
]  # fmt: skip
CASTS = [(*pair, dtype) for pair in CAST for dtype in LOW]


@pytest.mark.often("llama-fitted-dtype3")
@pytest.mark.parametrize(("family", "option", "dtype"), CASTS)
def test_load_in_another_dtype(
    family: str, option: str, dtype: torch.dtype, models: Models
) -> None:
    made = models(family, option)
    model = made.load(dtype=dtype)
    assert model.dtype == dtype
    dense = type(made.dense).from_pretrained(made.source, dtype=dtype)
    for name, layer in structured(model).items():
        kept = dense_weight(dense, name).dtype  # T5 keeps some of its weights in float32
        assert {parameter.dtype for parameter in layer.parameters()} == {kept}, name
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.inputs().items()}
    found = outputs(model, inputs)
    assert {tensor.dtype for tensor in found} == {t.dtype for t in outputs(dense, inputs)}
    assert distance(found, outputs(densified(made.load(), made.dense), made.inputs())) <= LOW[dtype]


@pytest.mark.parametrize(
    ("family", "option", "dtype"),
    [("llama", "fitted", torch.float16), ("mixtral", "dct", torch.bfloat16)],
)
def test_cast_after_loading(family: str, option: str, dtype: torch.dtype, models: Models) -> None:
    made = models(family, option)
    model, wanted = made.load(), outputs(made.load(), made.inputs())
    outputs(model, made.inputs())  # fills caches in float32
    model = model.half() if dtype == torch.float16 else model.to(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    found = outputs(model, made.inputs())
    assert found[0].dtype == dtype
    assert distance(found, wanted) <= LOW[dtype]
    model.float()
    assert distance(outputs(model, made.inputs()), wanted) <= LOW[dtype]
    model.double()
    assert outputs(model, made.inputs())[0].dtype == torch.float64


@pytest.mark.often("fitted-float16")
@pytest.mark.parametrize(("option", "dtype"), [("fitted", "float16"), ("svd", "bfloat16")])
def test_convert_to_another_dtype(option: str, dtype: str, tmp_path: Path) -> None:
    made = make("llama", tmp_path, option, aware=True, dtype=dtype)
    model = made.load()
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    wanted = outputs(densified(made.load(dtype=torch.float32), made.dense), made.inputs())
    assert distance(outputs(model, made.inputs()), wanted) <= LOW[getattr(torch, dtype)]
    model.save_pretrained(tmp_path / "again")
    again = type(made.dense).from_pretrained(tmp_path / "again")
    assert distance(outputs(again, made.inputs()), outputs(model, made.inputs())) == 0


@pytest.mark.often("llama-False")
@pytest.mark.parametrize(("family", "aware"), [("llama", False), ("gpt2", True), ("mixtral", True)])
def test_shards(family: str, aware: bool, tmp_path: Path) -> None:
    whole = make(family, tmp_path / "one", "fitted", aware=aware)
    cut = make(family, tmp_path / "many", "fitted", aware=aware, max_shard_size="20KB")
    files = sorted(path.name for path in cut.folder.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((cut.folder / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(
        Artifact.open(cut.folder).store.nbytes(key) for key in index["weight_map"]
    )
    small = [path for path in cut.folder.glob("*.safetensors") if path.stat().st_size <= 30_000]
    assert len(small) >= len(files) - 1  # one tensor may be larger than a shard
    assert distance(outputs(whole.load(), whole.inputs()), outputs(cut.load(), cut.inputs())) == 0


class Tagger(BertPreTrainedModel):  # type: ignore[misc]
    """A user's own class around the encoder, under the usual name."""

    name = "bert"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.add_module(self.name, BertModel(config, add_pooling_layer=False))
        self.head = nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, **inputs: Any) -> Tensor:
        """Logits of the tokens."""
        found: Tensor = self.head(self.get_submodule(self.name)(**inputs)[0])
        return found


class Wrapped(Tagger):
    """Under a name of its own."""

    name = "text"


FROM_SCRATCH: dict[str, Any] = {"init": "random", "norm": "tensor"}


@pytest.mark.parametrize(
    ("kind", "said"), [(Tagger, None), (Wrapped, None), (Wrapped, FROM_SCRATCH)]
)
def test_classes_of_users_are_saved_and_loaded(
    kind: type[Tagger], said: dict[str, Any] | None, tmp_path: Path
) -> None:
    bare, small, again = (tmp_path / name for name in ("bare", "small", "again"))
    BertModel(build("bert").config).save_pretrained(bare)
    lprod = {"method": {"name": "lprod", "p": 2}, **(said or {})}
    convert(str(bare), Convert.model_validate(lprod) if said else recipe("svd"), small)
    encoder = BertModel.from_pretrained(small, add_pooling_layer=False)
    encoder.save_pretrained(tmp_path / "encoder")
    BertModel.from_pretrained(tmp_path / "encoder", add_pooling_layer=False)
    model = kind(encoder.config).eval()
    model.set_submodule(kind.name, encoder.eval())
    model.save_pretrained(again)
    loaded = load_whole(kind, again)
    assert structured(loaded)
    inputs = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        assert distance([loaded.eval()(**inputs)], [model(**inputs)]) <= 1e-6


# What a loaded model can do: generate, be copied, train


@pytest.mark.often("llama-fitted")
@pytest.mark.parametrize(
    ("family", "option"),
    [("llama", "fitted"), ("gpt2", "residual"), ("t5", "dct"), ("mixtral", "svd"), ("bart", "dct")],
)
def test_generation_with_a_cache(family: str, option: str, models: Models) -> None:
    made = models(family, option)
    assert_same_without_a_cache(made.load(), made.inputs()["input_ids"][:1])


@pytest.mark.parametrize(
    ("way", "family"), [("deepcopy", "llama"), ("pickle", "mixtral"), ("loaded again", "llama")]
)
def test_copies_are_whole_and_independent(way: str, family: str, models: Models) -> None:
    made = models(family, "fitted")
    model, inputs = made.load(), made.inputs()
    wanted = outputs(model, inputs)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = made.load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert distance(outputs(twin, inputs), wanted) == 0
    layers = set(twin.modules())
    assert all(layers.issuperset(layer._input_owner) for layer in structured(twin).values())


TRAINED = [*(("bert", option) for option in OPTIONS), ("mixtral", "fitted"), ("t5", "residual")]


@pytest.mark.often("bert-dct", "bert-fitted", "bert-tucker-model", "mixtral-fitted")
@pytest.mark.parametrize(("family", "option"), TRAINED)
def test_two_steps_of_adamw_change_every_tensor(family: str, option: str, models: Models) -> None:
    model, inputs = models(family, option).load().train(), TINY[family].inputs(8, 16, 0)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".tc_" in n}
    assert before
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    for _ in range(2):
        optimiser.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimiser.step()
    for name, tensor in before.items():
        after = model.get_parameter(name)
        assert bool(torch.isfinite(after).all()), name
        assert bool((after != tensor).any()), name


def test_trainer(models: Models, tmp_path: Path) -> None:
    made = models("bert", "fitted")
    model = made.load()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    texts = TINY["bert"].inputs(8, 8, 0)
    texts["labels"] = texts["input_ids"]
    rows = [{name: values[row] for name, values in texts.items()} for row in range(8)]
    options = TrainingArguments(
        str(tmp_path / "runs"),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=1,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    Artifact.open(tmp_path / "trained")
    again = type(made.dense).from_pretrained(tmp_path / "trained").eval()
    assert distance(outputs(model.eval(), made.inputs()), outputs(again, made.inputs())) <= 1e-6
    changed = [n for n, t in again.state_dict().items() if ".tc_" in n and not t.equal(before[n])]
    assert len(changed) == sum(".tc_" in name for name in before)
    middle = type(made.dense).from_pretrained(tmp_path / "runs" / "checkpoint-1")
    Trainer(model=middle, args=options, train_dataset=rows).train(
        resume_from_checkpoint=str(tmp_path / "runs" / "checkpoint-1")
    )
    assert distance(outputs(middle.eval(), made.inputs()), outputs(again, made.inputs())) <= 1e-5


@pytest.mark.parametrize(
    ("family", "option", "reentrant"), [("llama", "fitted", True), ("mixtral", "residual", False)]
)
def test_gradient_checkpointing(family: str, option: str, reentrant: bool, models: Models) -> None:
    made = models(family, option)
    inputs = made.inputs()
    gradients = []
    for checkpointed in (False, True):
        model = made.load().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    assert distance(*gradients) <= 1e-6
