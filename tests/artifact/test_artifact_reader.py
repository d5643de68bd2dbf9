"""Strict reading of converted models: what is damaged is refused, and named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from tcompress.artifact.checksums import seal
from tcompress.artifact.manifest import read_manifest, write_manifest
from tcompress.artifact.reader import Artifact, check_files, is_converted, verify_files
from tcompress.conversion.converter import convert
from tcompress.errors import ArtifactError
from tcompress.exports.dense import export_dense
from tcompress.project import UPDATE
from tcompress.reporting.model_report import report_of
from tests.support.converted import converted, recipe
from tests.support.model_folders import edited

QUERY, KEY = (f"bert.encoder.layer.0.attention.self.{name}" for name in ("query", "key"))
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted("bert", tmp_path_factory.mktemp("bert")).folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def rewrite(weights: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, {"format": "pt"})


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    with edited(path) as content:
        change(content)


def refused(folder: Path) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(folder)
    return caught.value


def test_an_intact_model_opens(written: Path) -> None:
    artifact = Artifact.open(str(written))
    assert artifact.folder == written
    assert artifact.layers == artifact.manifest.plan.layers
    assert artifact.config["model_type"] == "bert"
    assert f"{QUERY}.tc_slices" in artifact.store
    verify_files(artifact.folder)
    assert is_converted(written)
    assert not is_converted(written.parent / "bert")
    section = artifact.config["quantization_config"]
    assert "`import tcompress` before loading" in section["note"]


def test_a_model_without_manifest_opens(folder: Path) -> None:
    (folder / "tcompress.json").unlink()
    assert Artifact.open(folder).manifest is None


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_saved_again_with_another_head_opens(
    written: Path, tmp_path: Path, auto: Any
) -> None:
    auto.from_pretrained(written).save_pretrained(tmp_path / "again")
    layers = Artifact.open(tmp_path / "again").layers
    name = QUERY if auto is not AutoModel else QUERY.removeprefix("bert.")
    assert layers[0].name == layers[1].input_of == name
    assert layers[0].block == name.partition(".attention")[0]


def test_all_problems_of_tensors_are_in_one_error(folder: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{KEY}.tc_slices")
        tensors[f"{QUERY}.tc_slices"] = torch.zeros(4, 8, 7)
        tensors[f"{QUERY}.tc_in0.generators"] = torch.zeros(3)
        tensors[f"{QUERY}.weight"] = torch.zeros(32, 32)

    rewrite(folder / WEIGHTS, damage)
    error = refused(folder)
    message = "the weights do not fit the plan in `config.json`, 4 problems:\n"
    assert error.message.startswith(f"{message}  - `{KEY}.tc_slices` is missing\n")
    assert f"`{QUERY}.tc_slices` has shape [4, 8, 7], the plan says [4, 8, 8]" in error.message
    assert f"`{QUERY}.weight` has shape [32, 32], the plan says [0]" in error.message
    assert f"`{QUERY}.tc_in0.generators` is not in the plan" in error.message
    assert error.hint == "take `config.json` and the weights from one and the same conversion"


def test_damages_of_several_files_are_in_one_error(folder: Path) -> None:
    name = Artifact.open(folder).layers[1].name
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(5000)
    (folder / "tcompress.json").write_text("{")
    edit(folder / "config.json", lambda config: plan_of(config)[1].update(kind="lineal"))
    error = refused(folder)
    assert f"the converted model in `{folder}` is damaged, 3 problems:" in error.message
    assert f"the plan in `config.json` is damaged at layer `{name}`" in error.message
    assert "`model.safetensors` is truncated" in error.message
    assert f"`{folder / 'tcompress.json'}` is damaged" in error.message


def plan_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = config["quantization_config"]["plan"]["layers"]
    return layers


@pytest.mark.parametrize("version", [6, 0, None, "1"])
def test_another_format_version_is_refused(folder: Path, version: Any) -> None:
    edit(
        folder / "config.json",
        lambda config: config["quantization_config"].update(format_version=version),
    )
    error = refused(folder)
    assert error.message == (
        f"the model has format version `{version}`, this tcompress reads up to 5"
    )
    assert error.hint == f"upgrade: `{UPDATE}`"
    with pytest.raises(ArtifactError, match=f"format version `{version}`.*reads up to 5"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tcompress.json", lambda found: found.update(format_version=6),
         "the model has format version `6`, this tcompress reads up to 5"),
        ("config.json", lambda found: plan_of(found)[0].update(role="k"),
         "`tcompress.json` and `config.json` hold different plans: "
         f"`{QUERY}.weight` differs in `role`"),
        ("config.json", lambda found: found["quantization_config"].pop("plan"),
         "`quantization_config` in `config.json` has no plan"),
    ],
)  # fmt: skip
def test_edited_files_are_refused(folder: Path, file: str, change: Any, message: str) -> None:
    edit(folder / file, change)
    assert refused(folder).message == message


def test_an_edited_plan_is_refused_without_manifest(folder: Path) -> None:
    (folder / "tcompress.json").unlink()
    AutoModel.from_pretrained(folder).save_pretrained(folder / "again")
    edit(folder / "again/config.json", lambda config: plan_of(config)[0].update(role="k"))
    message = "the plan in `config.json` was changed since it was written"
    assert refused(folder / "again").message.startswith(message)
    with pytest.raises(ArtifactError, match=message):
        AutoModel.from_pretrained(folder / "again")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan[0]["parts"][0]["terms"][0].update(transform="dft"), "query.weight` d"),
        (lambda plan: plan[0]["parts"][0]["terms"][0].update(in_features=64), "query.weight` d"),
        (lambda plan: plan.pop(3), "attention.output.dense.weight` is missing"),
        (lambda plan: plan.append(plan[0]), "stand twice"),
        (lambda plan: plan.clear(), "is missing"),
    ],
)
def test_an_edited_plan_is_not_loaded(folder: Path, change: Any, text: str) -> None:
    edit(folder / "config.json", lambda config: change(plan_of(config)))
    for read in (AutoModel.from_pretrained, Artifact.open):
        with pytest.raises(ArtifactError, match=text):
            read(folder)


@pytest.mark.parametrize(
    "name",
    [
        "bert.embeddings.position_embeddings.weight",
        "bert.encoder.layer.1.output.LayerNorm.bias",
        "cls.predictions.transform.dense.weight",
    ],
)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForMaskedLM])
def test_a_missing_dense_tensor_is_not_made_up(folder: Path, name: str, auto: Any) -> None:
    rewrite(folder / WEIGHTS, lambda tensors: tensors.pop(name))
    with pytest.raises(ArtifactError, match=f"`{name}` is missing"):
        auto.from_pretrained(folder)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_missing_tensor_of_a_model_saved_again_is_not_made_up(
    folder: Path, variant: str | None
) -> None:
    again = folder / "again"
    AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(again, variant=variant)
    AutoModelForMaskedLM.from_pretrained(again, variant=variant)
    weights = next(again.glob("*.safetensors"))
    rewrite(weights, lambda tensors: tensors.pop("bert.embeddings.LayerNorm.weight"))
    with pytest.raises(ArtifactError, match=r"LayerNorm\.weight` is missing") as caught:
        AutoModelForMaskedLM.from_pretrained(again, variant=variant)
    assert "left out on purpose" in caught.value.hint


def test_infinity_is_let_through_in_configs_only(written: Path, tmp_path: Path) -> None:
    """Families with Mamba's layers have such a limit of time steps."""
    source = Path(shutil.copytree(written.parent / "bert", tmp_path / "bert"))
    edit(source / "config.json", lambda config: config.update(limit=[0.0, float("inf")]))
    convert(str(source), recipe(), tmp_path / "small")
    assert "Infinity" in (tmp_path / "small/config.json").read_text()
    assert report_of(tmp_path / "small").layers
    AutoModel.from_pretrained(tmp_path / "small")
    AutoModel.from_pretrained(export_dense(tmp_path / "small", tmp_path / "plain"))
    edit(tmp_path / "small/tcompress.json", lambda content: content.update(more=float("nan")))
    with pytest.raises(ArtifactError, match="`NaN`, which is no number of JSON"):
        Artifact.open(tmp_path / "small")


def test_older_artefacts_load(folder: Path) -> None:
    """Without digests, sizes and checksums of anything but weights."""
    edit(folder / "config.json", lambda config: config["quantization_config"].pop("digest"))

    def older(manifest: dict[str, Any]) -> None:
        del manifest["digest"], manifest["sizes"]
        manifest["checksums"] = {WEIGHTS: manifest["checksums"][WEIGHTS]}

    edit(folder / "tcompress.json", older)
    AutoModel.from_pretrained(folder)
    found = verify_files(folder)
    assert found.files == 1
    assert set(found.others) == {"README.md", "config.json"}
    flip(folder / WEIGHTS, -1)
    with pytest.raises(ArtifactError, match="differs from its checksum"):
        check_files(folder)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_flipped_byte_is_found_in_any_file(written: Path, folder: Path, part: float) -> None:
    names = [path.name for path in written.iterdir()]
    assert {"README.md", "config.json", "tcompress.json", WEIGHTS} <= set(names)
    assert verify_files(folder).files == len(names)
    for name in names:
        content = (folder / name).read_bytes()
        flip(folder / name, int(len(content) * part))
        said = f"is not as it was written: .*`{name}` differs from its checksum"
        with pytest.raises(ArtifactError, match=name if name == "tcompress.json" else said):
            verify_files(folder)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", ["README.md", "report.html"])
def test_a_card_or_page_that_was_rewritten_or_not_downloaded_is_no_damage(
    name: str, folder: Path
) -> None:
    (folder / name).write_text("as it was")
    write_manifest(folder, read_manifest(folder).model_copy(update=seal(folder)))
    count = verify_files(folder).files
    (folder / name).write_text("another")
    assert check_files(folder) is not None
    (folder / name).unlink()
    assert verify_files(folder).files == count - 1
    flip(folder / WEIGHTS, -1)
    with pytest.raises(ArtifactError, match=r"`model\.safetensors` differs from its checksum"):
        check_files(folder)


def test_metrics_keep_a_folder_intact(folder: Path) -> None:
    manifest = read_manifest(folder)
    write_manifest(folder, manifest.model_copy(update={"seconds": 1.0}))
    verify_files(folder)
    assert read_manifest(folder).seconds == 1.0  # type: ignore[union-attr]


def test_other_weight_files_are_found_by_their_checksums(folder: Path) -> None:
    other = {"model-00001-of-00002.safetensors": "0"}
    edit(folder / "tcompress.json", lambda found: found.update(checksums=other, digest=None))
    with pytest.raises(ArtifactError) as caught:
        verify_files(folder)
    assert "`model-00001-of-00002.safetensors` is missing" in caught.value.message
    assert "`model.safetensors` is not in `tcompress.json`" in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "`{folder}` has no `config.json`"),
        ("{", "`{path}` is no valid JSON ("),
        ("[]", "`{path}` holds a list, expected an object"),
    ],
)
def test_a_folder_without_config_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    nowhere = tmp_path / "nowhere"
    assert not is_converted(nowhere)
    assert refused(nowhere).message == f"there is no folder `{nowhere}`"
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert not is_converted(tmp_path)
    assert refused(tmp_path).message.startswith(message.format(folder=tmp_path, path=path))
