"""One command from a dense model to a folder that ships."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel

from tcompress.artifact.checksums import stamp_of, stamps_of
from tcompress.artifact.manifest import Speed, manifest_of_dense, read_manifest, write_manifest
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import partial_folder
from tcompress.compression import baselines, cutting, stages, working
from tcompress.compression.forecast import forecast
from tcompress.compression.table import Row, usage_of
from tcompress.compression.working import DENSE, Work
from tcompress.errors import DataError, InputError
from tcompress.options.compress_options import Compress
from tcompress.options.read import read
from tcompress.progress import Silent
from tests.support.cli import completed, run
from tests.support.converted import converted
from tests.support.evaluation import classifier, encoder, pairs_file, rows_file
from tests.support.model_folders import model_folder, sentences, text_file
from tests.support.sentence_folders import base, in_old_layout
from tests.support.tiny import build


@pytest.fixture
def place(tmp_path: Path, own_folder: None) -> Path:
    encoder(tmp_path / "bert")
    text_file(tmp_path / "texts.txt", sentences(60))
    pairs_file(tmp_path / "pairs.jsonl", 40)
    return tmp_path


TYPED = ("compress", "bert", "--data", "texts.txt", "--smoke", "--minutes", "0.2", "-o", "small")


def test_a_size_is_reached_in_pytorch_and_nothing_is_done_twice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = (place / "bert" / "model.safetensors").stat().st_size
    size = f"{int(0.8 * dense)}B"
    measured = ("--task", "sts", "--test-data", "pairs.jsonl")
    typed = (*TYPED, "--runtime", "torch", "--size", size, *measured)
    with monkeypatch.context() as stopped:  # before it is clear that one conversion is enough
        stopped.setattr(cutting, "next_ask", Mock(side_effect=KeyboardInterrupt))
        done = run(*typed)
    assert done.code == 130
    assert "Converting" in done.err
    with monkeypatch.context() as stopped:  # before the folder gets its name
        stopped.setattr(stages, "write_records", Mock(side_effect=KeyboardInterrupt))
        done = run(*typed)
    assert done.code == 130
    assert "Converting" not in done.err
    assert "Healing" in done.err
    assert "stages that were finished are kept" in done.err
    assert not (place / "small").exists()
    done = run(*typed, "--json")
    assert "Converting" not in done.err
    assert "Healing" not in done.err
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in done.document["rows"]}
    assert rows["this model"]["bytes"] <= 0.8 * dense < rows["dense"]["bytes"]
    assert done.document["missed"] == []
    assert done.document["quality"] == "spearman"
    assert rows["this model"]["quality"] is not None
    assert 0 < rows["this model"]["agreement"] <= 1
    assert read_manifest(place / "small").plan.budget is not None
    assert AutoModel.from_pretrained(place / "small").config.hidden_size
    assert not partial_folder(place / "small").exists()


@pytest.mark.slow
def test_a_dense_file_of_eight_bits_may_be_all_that_is_needed(place: Path) -> None:
    pytest.importorskip("onnxruntime")
    dense = (place / "bert" / "model.safetensors").stat().st_size
    measured = ("--task", "sts", "--test-data", "pairs.jsonl")
    done = completed(*TYPED, "--size", f"{2 * dense}B", *measured)
    assert "nothing is cut" in done.err
    (file,) = (item for item in read_manifest(place / "small").exports if item.bits == 8)
    assert [item.name for item in file.metrics] == ["spearman", "pearson", "agreement"]
    words = "small in its int8 file is "
    assert words in (place / "small" / "report.html").read_text()
    assert words in (place / "small" / "README.md").read_text()
    assert (place / "small" / "onnx" / "model_int8.onnx").is_file()
    assert json.loads((place / "small" / "config.json").read_text())["model_type"] == "bert"


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_the_printed_lines_run(family: str, tmp_path: Path) -> None:
    kind = type(build(family))
    folder, writes = model_folder(family, tmp_path / family), kind.can_generate()
    how: dict[str, bool] = {"sentences": False, "pictures": False, "writes": writes}
    names: dict[str, Any] = {}
    exec(usage_of(folder, "model.safetensors", kind.__name__, **how), names)
    assert isinstance(names["outputs"], torch.Tensor) == writes
    # A file with a cache asks for more inputs than a tokenizer gives.
    lines = usage_of(folder, "onnx/model_int8.onnx", kind.__name__, **how)
    assert ("ORTModelForCausalLM" in lines) == writes
    compile(lines, "printed", "exec")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_loss": 0.01, "speedup": 2.0}, "one or the other"),
        ({"task": "sts"}, "go together"),
        ({"speedup": 0.5}, "speedup"),
    ],
)
def test_goals_that_contradict(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(Compress, options)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_size_out_of_reach_is_refused_before_any_work(more: tuple[str, ...], place: Path) -> None:
    done = run(*TYPED, "--runtime", "torch", "--size", "10", *more)
    assert done.code == 2
    assert "`--size 10`, in bytes, is out of reach: the smallest possible is " in done.err
    assert "allow more bytes" in done.err
    assert "`--vocab data`" in done.err
    assert "Measuring" not in done.err
    assert not partial_folder(place / "small").exists()


def test_data_without_labels_is_refused_before_any_work(place: Path) -> None:
    classifier(place / "headed")
    rows_file(place / "rows.jsonl", text=sentences(10), verdict=[0, 1] * 5)
    options = {"task": "classification", "test_data": ["rows.jsonl"], "runtime": "torch"}
    with pytest.raises(DataError, match=r"a column for `label`.* `verdict`") as caught:
        stages.compress("headed", "small", read(Compress, options))
    assert "docs/healing.md#data-files" in str(caught.value.hint)
    assert not partial_folder(place / "small").exists()


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_what_healing_reads_is_looked_at_first(more: tuple[str, ...], place: Path) -> None:
    size = (model_folder("vit", place / "vit") / "model.safetensors").stat().st_size
    typed = ("compress", "vit", "--runtime", "torch", "-o", "small", *more, "--size")
    done = run(*typed, f"{int(0.8 * size)}B")
    assert done.code == 2
    assert "no built-in pictures to train on" in done.err
    assert not partial_folder(place / "small").exists()
    if more:
        assert "3. heal nothing\n" in run(*typed, f"{size}B").out  # nothing is cut


def test_what_cannot_be_trained_stays_as_it_was_converted(place: Path) -> None:
    work = _work(model_folder("whisper", place / "whisper"), runtime="torch")
    folder, words = stages._healed(work, place / "narrowed")
    assert folder == place / "narrowed"
    assert "takes sound, which cannot be trained on yet" in words
    assert "heal nothing: " in forecast(work.source, work.settings).stages[2]


def test_paths_are_looked_at_first(place: Path) -> None:
    goal = ("--size", "3MB", "--runtime", "torch")
    done = run("compress", "./nowhere", "--data", "absent.txt", *goal)
    assert done.code == 2
    assert "nowhere" in done.err
    assert "absent.txt" in done.err


@pytest.mark.parametrize("more", [(), ("--force",), ("--force", "--dry-run")])
def test_the_model_itself_is_never_replaced(more: tuple[str, ...], place: Path) -> None:
    done = run("compress", "bert", "-o", "bert", "--runtime", "torch", *more)
    assert done.code == 2
    assert "is the model's own folder, or contains it" in done.err
    in_old_layout(base(place / "old"))
    for model, output in (("bert", "bert"), ("old", "old/0_Transformer")):
        with pytest.raises(InputError, match="the model's own folder"):
            stages.compress(model, output, read(Compress, {"runtime": "torch"}), force=True)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_what_is_converted_is_refused_at_once(more: tuple[str, ...], place: Path) -> None:
    converted("vit", place)
    done = run("compress", "vit-small", "--runtime", "torch", "-o", "small", *more)
    assert done.code == 2
    assert "`vit-small` is already converted by tcompress" in done.err
    assert not partial_folder(place / "small").exists()


def test_work_on_other_data_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_effort", Mock(side_effect=KeyboardInterrupt))
    identities = []
    for count in (60, 60, 61):
        text_file(place / "texts.txt", sentences(count))
        assert run(*TYPED, "--runtime", "torch").code == 130
        identities.append((partial_folder(place / "small") / "identity").read_text())
    assert identities[0] == identities[1] != identities[2]
    before = stamp_of(str(place))
    (partial_folder(place / "small") / "more").write_text("of this run, no data")
    assert stamp_of(str(place)) == before


def test_results_in_a_folder_of_data_are_no_data(place: Path) -> None:
    before = stamp_of(str(place))
    base(place / "made" / "model")
    (place / "made" / "tcompress.json").touch()
    (place / "report.html").touch()
    assert stamp_of(str(place)) == before
    (place / "more.txt").touch()
    assert stamp_of(str(place)) != before
    assert stamps_of(["~nobody-has-this-name/x.txt", "a" * 300]) == {}


def test_an_encoder_in_the_old_layout_stays_one(place: Path) -> None:
    in_old_layout(base(place / "old"))
    options = {"runtime": "torch", "size": 10**7, "minutes": 0.1, "smoke": True}
    done = stages.compress("old", "small", read(Compress, options))
    assert (done.file, done.healed) == ("model.safetensors", "not needed")
    assert (place / "small" / "1_Pooling" / "config.json").is_file()
    assert json.loads((place / "small" / "modules.json").read_text())[0]["path"] == ""


def _work(model: Path, **options: Any) -> Work:
    place: Any = SimpleNamespace(folder=model.parent / "place", note=Mock())
    crew: Any = None
    settings = read(Compress, options)
    return Work(open_checked(str(model)), settings, place, Silent(), lambda text: None, crew)


def test_files_that_are_read_count_and_no_others(place: Path) -> None:
    weights = (place / "bert" / "model.safetensors").read_bytes()
    (place / "bert" / "consolidated.safetensors").write_bytes(weights)
    bert = _work(place / "bert")
    model = build("bert")
    model.config.save_pretrained(place / "older")
    path = place / "older" / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    older = _work(place / "older")
    for work, size in ((bert, len(weights)), (older, path.stat().st_size)):
        measured = work.measured(work.dense)
        assert (measured.bytes, measured.speedup) == (size, 1.0)


def test_times_that_came_with_the_model_are_not_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _work(place / "bert", runtime="onnx-int8")
    numbers = dict.fromkeys(("milliseconds", "baseline_milliseconds", "tokens_per_second"), 1.0)
    where = {"batch": 1, "length": 8, "mode": "onnx-int8", "baseline": "other", "protocol": {}}
    speed = Speed(ratio=90.0, **where, **numbers)
    timed = manifest_of_dense(work.source).model_copy(update={"speed": [speed]})

    def export(_: Path, folder: Path, *__: Any, **___: Any) -> None:
        folder.mkdir(parents=True)
        write_manifest(folder, timed)

    monkeypatch.setattr(working, "export_onnx", export)
    monkeypatch.setattr(working, "file_of", Mock())
    folder = replace(work, runtime="onnx-int8").exported(work.original, DENSE, DENSE)
    assert read_manifest(folder).speed == []


def test_layers_of_two_bytes_a_number_count_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = Mock(return_value=0)
    monkeypatch.setattr(baselines, "layers_that_reach", reach)
    build("bert").to(torch.bfloat16).save_pretrained(place / "half")
    for model in ("bert", "half"):
        baselines._fewer_layers(_work(place / model), Row(DENSE, "torch", 1, 1.0))
    (*_, whole), (*_, half) = (call.args for call in reach.call_args_list)
    assert whole == 2 * half


def test_a_row_is_of_the_folder_that_was_measured(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, notes = _work(place / "bert", runtime="torch"), list[dict[str, Any]]()
    kept: Any = SimpleNamespace(
        folder=place, notes=lambda kind: notes, note=lambda kind, **note: notes.append(note)
    )
    monkeypatch.setattr(Work, "speed", Mock(side_effect=(2.0, 3.0)))
    monkeypatch.setattr(Work, "bytes_read", Mock(return_value=1))
    monkeypatch.setattr(Work, "timed", lambda self, stage: nullcontext())
    work = replace(work, place=kept)
    folders = ("converted-0", "healed", "converted-0", "healed")
    rows = [baselines.row_of(work, "this model", place / name, "torch") for name in folders]
    assert [row.speedup for row in rows] == [2.0, 3.0, 2.0, 3.0]


def test_stages_of_a_run_that_was_stopped_are_not_blamed() -> None:
    notes = [{"stage": stage, "seconds": 60.0 * n, "began": n} for n, stage in enumerate("AB", 1)]
    place = SimpleNamespace(notes=lambda kind: notes)
    settings = SimpleNamespace(most_minutes=1.0)
    facts = {"settings": settings, "minutes_left": -1.0, "place": place}
    for began, words in ((1, "; a took"), (2, "; b took"), (3, "in place of 1 minute")):
        work: Any = SimpleNamespace(**facts, began=began)
        (text,) = stages._overrun(work)
        assert words in text
