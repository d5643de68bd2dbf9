"""The working folder, what it refuses, and how its result takes the output's place."""

import errno
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tcompress
from tcompress import files
from tcompress.artifact.workplace import (
    Workplace,
    check_output,
    check_place,
    check_sweep,
    partial_folder,
    tidy,
)
from tcompress.errors import DiskError, InputError, RecipeError, TCompressError, WriteError
from tcompress.files import beside, write_text
from tcompress.models import resolve
from tcompress.options import Convert, Finetune
from tcompress.reporting.model_report import report_of
from tests.support.cli import run
from tests.support.model_folders import sentences, text_file
from tests.support.sentence_folders import base


def model(folder: Path, text: str) -> Path:
    """Writes what looks like a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_text(text)
    return folder


def work(output: Path, text: str, *, force: bool = False, identity: str = "x") -> Workplace:
    """A working folder with a finished model in it."""
    place = Workplace(output, identity, force=force)
    model(place.model, text)
    place.note("shard", file="model.safetensors")
    return place


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Outputs
def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


NODES: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (lambda path: path.write_text("mine"), "is a file"),
    "pipe": (os.mkfifo, "is a named pipe"),
    "socket": (listen, "is a socket"),
    "link": (lambda path: path.symlink_to("elsewhere"), "is a link to `elsewhere`"),
}


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("force", [False, True])
def test_outputs_that_are_no_folders(
    node: str, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is looked at: there is no such model."""
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    make, words = NODES[node]
    make(Path("out"))
    before = Path("out").lstat().st_ino
    done = run("convert", "./no-such-model", "-o", "out", *(["--force"] if force else []))
    assert done.code == 2
    assert words in done.err
    assert Path("out").lstat().st_ino == before
    assert left(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("owner", "name", "answer", "words"),
    [
        (Path, "lstat", os.stat_result((stat.S_IFCHR | 0o666, *[0] * 9)), "out` is a device"),
        (os, "access", False, r"cannot be written \(Permission denied\)"),
        (os.path, "ismount", True, "is where another disk is mounted"),
    ],
)
def test_outputs_that_the_system_rules_out(
    owner: Any, name: str, answer: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(owner, name, Mock(return_value=answer))
    for force in (False, True):
        with pytest.raises(InputError, match=words):
            check_output(tmp_path / "out", force=force)
    assert left(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "name", ["file/sub", "file/a/b", "n" * 300, "n" * 250, "a/" + "n" * 300, "/proc/out"]
)
@pytest.mark.parametrize("command", ["convert", "finetune", "export"])
def test_places_that_take_no_folder(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    data = ["--data", "none.txt"] if command == "finetune" else []
    done = run(command, "./no-such-model", *data, "-o", name)
    assert done.code == 2
    assert "cannot be written (" in done.err
    assert left(tmp_path) == ["file"]


@pytest.mark.parametrize("name", [".", "..", "../inside", "../../outside"])
def test_the_current_folder_is_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever works in it would be nowhere; what is written into a folder may go there."""
    (folder := tmp_path / "outside" / "inside").mkdir(parents=True)
    monkeypatch.chdir(model(folder, "old"))
    model(folder.parent, "old")
    with pytest.raises(InputError, match="is the current folder, or contains it"):
        check_output(Path(name), force=True)
    check_sweep(Path(name), force=True)


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    partial_folder(tmp_path / "out").mkdir()  # as a kill may leave it
    check_output(tmp_path / "out", force=False)
    check_output(tmp_path / "a" / "b" / "out", force=False)
    assert left(tmp_path) == []


# --force
FOREIGN: dict[str, tuple[list[str], str]] = {
    "documents": (["a.txt", "b.txt", "c.txt", "thesis.pdf"], "`c.txt` and 1 more and no model"),
    "config alone": (["config.json"], "holds `config.json` and no model"),
    "repository": (["config.json", "model.safetensors", ".git"], "and a `.git`"),
}


@pytest.mark.parametrize("names", FOREIGN)
def test_force_replaces_models_only(names: str, tmp_path: Path) -> None:
    output = tmp_path / "docs"
    output.mkdir()
    for name in FOREIGN[names][0]:
        (output / name).write_text("mine")
    done = run("convert", "./no-such-model", "-o", output, "--force")
    assert done.code == 2
    assert FOREIGN[names][1] in done.err
    assert left(output) == sorted(FOREIGN[names][0])


def test_force_replaces_what_tcompress_wrote(tmp_path: Path) -> None:
    """Whatever has become of it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tcompress.json").touch()
    check_output(tmp_path / "out", force=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux exchanges two names at once")
def test_readers_always_find_a_model(tmp_path: Path) -> None:
    output, failures, over = model(tmp_path / "out", "old"), [], threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                (output / "config.json").read_text()
            except OSError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(100):
        work(output, f"{turn}", force=True).publish(force=True)
    over.set()
    reader.join()
    assert not failures
    assert (output / "config.json").read_text() == "99"
    assert left(tmp_path) == ["out"]


def test_systems_that_rename_in_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails takes the other one back."""
    output = model(tmp_path / "out", "old")
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    place, inner = work(output, "new", force=True), Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "model":
            raise OSError(errno.EIO, "Input/output error")
        return inner(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="Input/output"):
            place.publish(force=True)
    assert (output / "config.json").read_text() == "old"
    place.publish(force=True)
    assert (output / "config.json").read_text() == "new"
    assert left(tmp_path) == ["out"]


# What runs of earlier versions left behind when they were killed
def test_the_old_model_is_put_back(tmp_path: Path) -> None:
    output = tmp_path / "out"
    model(partial_folder(output) / "replaced", "old")
    with pytest.raises(InputError, match="is not empty"):
        Workplace(output, "another command")
    assert (output / "config.json").read_text() == "old"
    place = work(output, "new", force=True)
    place.publish(force=True)
    assert (output / "config.json").read_text() == "new"


def test_a_clean_up_that_was_cut_short(tmp_path: Path) -> None:
    output = model(tmp_path / "out", "new")
    (partial_folder(output) / "replaced" / "half").mkdir(parents=True)
    work(output, "newer", force=True).publish(force=True)
    assert (output / "config.json").read_text() == "newer"
    assert left(tmp_path) == ["out"]


def test_a_killed_clean_up_leaves_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = work(tmp_path / "out", "new")
    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "discard", lambda place: place.close())
        place.publish(force=False, result={"speed": 2})
    (place.folder / "journal.jsonl").unlink()  # the mark is the last to go
    again = Workplace(tmp_path / "out", "x")
    assert again.published
    assert again.result == {"speed": 2}
    again.discard()
    assert left(tmp_path) == ["out"]


# The working folder
def test_the_lock_is_held_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, refused = files.remove, []

    def remove(path: Path) -> None:
        with pytest.raises(InputError, match="another run is writing") as failed:
            Workplace(tmp_path / "out", "y", force=True)
        refused.append(failed.value)
        inner(path)

    place = work(tmp_path / "out", "new")
    monkeypatch.setattr(files, "remove", remove)
    place.publish(force=False)
    assert refused
    assert left(tmp_path) == ["out"]


def test_working_folders_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, own = partial_folder(tmp_path / "out"), os.geteuid()
    folder.mkdir()
    (folder / "identity").write_text("x")
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(files, "owner_given", lambda _: own + 1)
    for refuse in (check_place, lambda output: Workplace(output, "x")):
        with pytest.raises(InputError, match=f"belongs to user {own}"):
            refuse(tmp_path / "out")
    assert left(folder) == ["identity"]


def test_disks_without_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is made there belongs to one user, who is another one."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    work(tmp_path / "out", "new").close()
    check_place(tmp_path / "out")
    assert Workplace(tmp_path / "out", "x").resumed
    assert left(tmp_path) == [".out.partial"]


@pytest.mark.parametrize("error", [None, PermissionError(errno.EPERM, "Operation not permitted")])
def test_disks_without_modes(
    error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All folders look open, whatever is asked: work goes on all the same."""
    work(tmp_path / "out", "new").close()
    partial_folder(tmp_path / "out").chmod(0o777)
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=error))
    assert Workplace(tmp_path / "out", "x").resumed


def test_the_group_of_a_project_folder_is_handed_down(tmp_path: Path) -> None:
    (parent := tmp_path / "project").mkdir()
    parent.chmod(0o2775)
    (parent / "ordinary").mkdir()
    work(parent / "out", "begun").close()
    assert partial_folder(parent / "out").stat().st_mode & 0o777 == 0o700
    work(parent / "out", "new").publish(force=False)
    found, expected = (parent / "out").stat(), (parent / "ordinary").stat()
    assert (found.st_mode, found.st_gid) == (expected.st_mode, expected.st_gid)


def test_a_clean_up_leaves_the_work_of_other_commands(tmp_path: Path) -> None:
    output = model(tmp_path / "out", "old")
    work(output, "newer", force=True).close()
    tidy(output)
    assert Workplace(output, "x", force=True).resumed
    mark = partial_folder(output) / "publishing"  # killed before the result took its place
    facts = {"folder": mark.with_name("model").stat().st_ino, "config": "", "identity": ""}
    mark.write_text(json.dumps(facts))
    tidy(output)
    assert (mark.parent / "model" / "config.json").read_text() == "newer"


@pytest.mark.parametrize("names", [[], ["lock"], ["publishing", "lock", "journal.jsonl"]])
def test_what_a_killed_clean_up_left_is_removed(names: list[str], tmp_path: Path) -> None:
    output = model(tmp_path / "out", "new")
    (folder := partial_folder(output)).mkdir()
    (folder / "model").mkdir()
    facts = {"folder": output.stat().st_ino, "config": "", "identity": ""}
    for name in names:
        (folder / name).write_text(json.dumps(facts))
    tidy(output)
    assert left(tmp_path) == ["out"]


def test_what_failed_its_proof_is_not_used_again(tmp_path: Path) -> None:
    """What was fitted is."""
    place = work(tmp_path / "out", "wrong")
    place.note("shard", file="model.safetensors", sha256="0")
    place.note("fit", layer="a")
    with pytest.raises(WriteError) as failed, place.working():
        raise WriteError("it does not load", "report it")
    assert failed.value.hint == "report it"  # of fits there is only the journal
    again = Workplace(tmp_path / "out", "x")
    assert again.resumed
    assert not left(again.model)
    assert again.notes("shard")[-1]["sha256"] is None
    assert again.notes("fit")


@pytest.mark.parametrize("kept", [True, False])
def test_a_failed_proof_says_where_fits_are(kept: bool, tmp_path: Path) -> None:
    place = work(tmp_path / "out", "wrong")
    (place.folder / "blocks").mkdir()
    (place.folder / "blocks" / "0.safetensors").write_text("fits")
    with pytest.raises(WriteError) as failed, place.working(lambda error: kept):
        raise WriteError("it does not load", "report it")
    said = (
        f"; what was fitted is kept in `{place.folder}`, where the same command goes on, with the "
        "same versions of tcompress and torch"
    )
    assert failed.value.hint == "report it" + (said if kept else "")
    assert (place.folder / "blocks" / "0.safetensors").is_file() is kept


def test_a_link_in_place_of_the_working_folder(tmp_path: Path) -> None:
    victim = model(tmp_path / "victim", "mine")
    partial_folder(tmp_path / "out").symlink_to(victim)
    for refuse in (check_place, lambda output: Workplace(output, "x")):
        with pytest.raises(InputError, match="is a link, which no run of tcompress makes"):
            refuse(tmp_path / "out")
    assert left(victim) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["model", "lock", "identity", "journal.jsonl", "blocks", "x.tmp"])
def test_links_inside_are_not_followed(name: str, tmp_path: Path) -> None:
    victim, output = tmp_path / "victim", tmp_path / "out"
    if name in ("model", "blocks"):
        model(victim, "mine")
    else:
        victim.write_text("mine")
    partial_folder(output).mkdir(mode=0o700)
    (partial_folder(output) / name).symlink_to(victim)
    work(output, "new").publish(force=False)
    mine = victim if victim.is_file() else victim / "config.json"
    assert mine.read_text() == "mine"
    assert not output.is_symlink()
    assert left(tmp_path) == ["out", "victim"]


def test_links_of_a_run_at_work_stay(tmp_path: Path) -> None:
    """A second one is refused before it touches anything."""
    place = Workplace(tmp_path / "out", "x")
    (place.model / "weights").symlink_to(tmp_path)
    with pytest.raises(InputError, match="another run is writing"):
        Workplace(tmp_path / "out", "x")
    assert (place.model / "weights").is_symlink()
    place.discard()


def test_a_working_folder_that_others_may_write(tmp_path: Path) -> None:
    """Nothing of it counts."""
    work(tmp_path / "out", "planted").close()
    assert stat.S_IMODE(partial_folder(tmp_path / "out").stat().st_mode) == 0o700
    partial_folder(tmp_path / "out").chmod(0o777)
    place = Workplace(tmp_path / "out", "x")
    assert not place.resumed
    assert not left(place.model)
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\x00", b"null", b'{"kind": 1}\n[]'])
@pytest.mark.parametrize("name", ["identity", "journal.jsonl", "publishing"])
def test_damaged_notes_are_no_obstacle(name: str, damage: bytes, tmp_path: Path) -> None:
    work(tmp_path / "out", "old").close()
    (partial_folder(tmp_path / "out") / name).write_bytes(damage)
    place = work(tmp_path / "out", "new")
    place.note("shard", file="b")
    assert place.notes("shard")[-1]["file"] == "b"
    place.publish(force=False)
    assert left(tmp_path) == ["out"]


# Files and disks
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_text(path, "old")
    with pytest.raises(LookupError), beside(path) as other:
        other.write_text("ne" + {}["new"])
    assert path.read_text() == "old"
    assert left(tmp_path) == ["facts.json"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES])
def test_disks_that_cannot_wait_for_folders(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    files.sync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        files.sync(tmp_path / "file")


def test_what_a_killed_process_of_the_same_number_left(tmp_path: Path) -> None:
    files._beside(tmp_path / "report.html").touch()
    files.check_file(tmp_path / "report.html")
    assert left(tmp_path) == []


def _no_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage: Any = type("Usage", (), {"free": free})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing, and where; the work can go on later."""
    place = work(tmp_path / "out", "new")
    place.need(1000)
    _no_room(monkeypatch, 250_000)
    with pytest.raises(DiskError) as failed, place.working():
        place.need(2_000_003)
    assert failed.value.message == (
        f"there is no space for `{tmp_path / 'out'}`: 0.2 MB are free on its disk of 2.0 MB that "
        "are needed: 1.8 MB are missing"
    )
    assert "run the same command again" in (failed.value.hint or "")
    assert Workplace(tmp_path / "out", "x").resumed


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_becomes_full(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_room(monkeypatch, 10)
    place = work(tmp_path / "out", "new")
    words = r"there is no space for .*: 10 bytes are free"
    with pytest.raises(DiskError, match=words), place.working():
        raise error
    assert Workplace(tmp_path / "out", "x").resumed


# The Python interface: what it refuses, how it names what it writes, and where it may be called


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def test_functions_do_the_same_whatever_torch_was_told(own_folder: None) -> None:
    base(Path("dense"))
    texts = text_file(Path("texts.txt"), sentences(8))
    step = {"steps": 1, "batch_size": 2, "learning_rate": 1e-4, "device": "cpu"}

    def results(place: Path) -> list[bytes]:
        how = {"method": "svd", "target": 0.5, "calibration": texts}
        tcompress.convert("dense", output=place / "small", **how)
        data = {"source": [texts]}
        tcompress.finetune(place / "small", output=place / "healed", data=data, **step)
        tcompress.export_dense(place / "healed", place / "plain")
        return [path.read_bytes() for path in sorted(place.glob("*/model.safetensors"))]

    def state() -> tuple[Any, ...]:
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return (torch.get_default_dtype(), torch.get_default_device(), *modes)

    alone = results(Path("alone"))
    with (
        torch.inference_mode(),
        _default_dtype(torch.bfloat16),
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        before = state()
        assert results(Path("inside")) == alone
        assert state() == before


def test_options_beside_a_recipe_are_not_forgotten(
    tiny: Callable[[str], Path], own_folder: None
) -> None:
    dense = tiny("bert")
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target": 0.5})
    with pytest.raises(RecipeError, match="`method`, `target` cannot be given beside a recipe"):
        tcompress.convert(dense, recipe=recipe, method="svd", target=0.25)
    with pytest.raises(RecipeError, match="`steps` cannot be given beside a recipe"):
        tcompress.finetune(dense, recipe=Finetune(), steps=5)
    with pytest.raises(RecipeError, match="`targets`, `keep` cannot be given beside a recipe"):
        tcompress.sweep(dense, recipe="encoder/minilm-sweep", targets=[0.1], keep=["down"])


def test_what_is_finished_is_not_thrown_away(tmp_path: Path) -> None:
    place = Workplace(tmp_path / "out", "same")
    (place.model / "weights").write_text("made")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("put there meanwhile")
    with pytest.raises(InputError, match="is not empty"):
        place.publish(force=False)
    place.discard()
    (tmp_path / "out" / "note.txt").unlink()
    again = Workplace(tmp_path / "out", "same")
    assert (again.model / "weights").read_text() == "made"
    again.close()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: report_of("bert", length=0), "length is 0, expected 1 or more"),
        (lambda: resolve("  "), "the model name is empty"),
        (lambda: tcompress.plan("bert", method="hot", fold="x"), "fold"),
    ],
)
def test_functions_refuse_what_commands_do(call: Callable[[], object], said: str) -> None:
    with pytest.raises(TCompressError) as caught:
        call()
    assert said in caught.value.message
