"""Names of models: folders, aliases, hub ids, and what is said when there is none."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from tcompress.data.tables import opened
from tcompress.errors import DataError, SourceError
from tcompress.models import ALIASES, SourceModel, default_output_name, resolve
from tcompress.models.names import cached_where_unreachable, shorten_texts
from tests.support.checkpoints import save


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for downloads from the hub: gives a folder, which is empty."""
    (tmp_path / "snapshot").mkdir()
    hub = Mock(return_value=str(tmp_path / "snapshot"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    # A relative name must not meet a folder of the place where the tests were started.
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


def failing(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], text: str = "reason") -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))


def test_an_existing_folder_wins_over_an_alias(hub: Mock) -> None:
    Path("gpt2").mkdir()
    assert resolve("gpt2") == Path("gpt2")
    hub.assert_not_called()


def test_an_alias_is_downloaded_with_revision_and_token(hub: Mock, tmp_path: Path) -> None:
    (tmp_path / "snapshot" / "model.safetensors").touch()
    assert resolve("bert-base", revision="v1", token="secret") == tmp_path / "snapshot"
    [call] = hub.call_args_list
    assert call.args == ("google-bert/bert-base-uncased",)
    assert (call.kwargs["revision"], call.kwargs["token"]) == ("v1", "secret")
    assert "model.safetensors" in call.kwargs["allow_patterns"]
    assert not any("bin" in pattern for pattern in call.kwargs["allow_patterns"])


def test_a_hub_id_is_taken_as_it_is(hub: Mock, tmp_path: Path) -> None:
    (tmp_path / "snapshot" / "model-00001-of-00002.safetensors").touch()
    resolve("owner/model")
    assert [call.args for call in hub.call_args_list] == [("owner/model",)]


def test_torch_files_are_fetched_only_without_safetensors(hub: Mock) -> None:
    resolve("opt-125m")
    first, second = (call.kwargs["allow_patterns"] for call in hub.call_args_list)
    assert "pytorch_model.bin" not in first
    assert "pytorch_model.bin" in second
    assert "model.safetensors" not in second


def test_every_alias_is_a_hub_id_in_lower_case() -> None:
    for alias, repo in ALIASES.items():
        assert alias == alias.lower()
        assert repo.count("/") == 1
    assert len(set(ALIASES.values())) == len(ALIASES)


def test_a_missing_path_lists_its_parent(tmp_path: Path) -> None:
    (tmp_path / "bert-small").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SourceError) as caught:
        resolve(str(tmp_path / "bert-smal"))
    assert caught.value.message == (
        f"there is no folder `{tmp_path}/bert-smal`; `{tmp_path}` holds `bert-small/`, `notes.txt`"
    )
    assert caught.value.hint == "did you mean `bert-small`"


def test_a_missing_path_lists_the_nearest_folder_there_is(tmp_path: Path) -> None:
    for number in range(14):
        (tmp_path / f"m{number:02}").mkdir()
    with pytest.raises(SourceError, match=r"holds `m00/`, .*`m11/` and 2 more") as caught:
        resolve(str(tmp_path / "a" / "b"))
    assert caught.value.hint == "check the path"


PATHS = ["./none", "../none", "~/no-such-folder-of-tcompress", "a/b/c", "models\\bert"]


@pytest.mark.parametrize("name", PATHS)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(hub: Mock, name: str) -> None:
    with pytest.raises(SourceError, match="there is no folder"):
        resolve(name)
    hub.assert_not_called()


@pytest.mark.parametrize("name", ["model.gguf", "."])
def test_a_gguf_file_leads_to_no_second_refusal(hub: Mock, name: str) -> None:
    Path("model.gguf").touch()
    with pytest.raises(SourceError) as caught:
        SourceModel.open(name)
    assert caught.value.hint.startswith("a GGUF file holds weights that are quantised")


NEAREST = "that is `google-bert/bert-base-uncased`; a private model needs a token"


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("bert-bse", errors.RepositoryNotFoundError, f"did you mean `bert-base`, {NEAREST}"),
        (
            "google/bert-base-uncasd",
            errors.RepositoryNotFoundError,
            f"did you mean `bert-base-uncased`, {NEAREST}",
        ),
        ("zzzz@9", errors.HFValidationError, "give a folder, an alias or a hub id such as"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(
    name: str, kind: type[Exception], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, kind)
    with pytest.raises(SourceError) as caught:
        resolve(name)
    assert caught.value.message == (
        f"there is no local folder and no model on the hub called `{name}`"
    )
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        (errors.GatedRepoError, "access to `meta-llama/Llama-3.2-1B` is restricted", "token"),
        (errors.RevisionNotFoundError, "has no revision `v9`", "leave the revision out"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached", "go online"),
        (errors.OfflineModeIsEnabled, "the hub cannot be reached", "HF_HUB_OFFLINE"),
        (ConnectionError, "the hub cannot be reached", "go online"),
        (type("ConnectError", (Exception,), {}), "the hub cannot be reached", "go online"),
        (OSError, "failed with `OSError: disk full`", "try again"),
    ],
)
def test_errors_of_the_hub_are_explained(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str, hint: str
) -> None:
    failing(monkeypatch, kind, "disk full")
    with pytest.raises(SourceError) as caught:
        resolve("llama-3.2-1b", revision="v9", token="secret")
    assert message in caught.value.message
    assert hint in str(caught.value.hint)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert-base", "bert-base-lprod-p4"),
        ("google-bert/bert-base-uncased", "bert-base-uncased-lprod-p4"),
        ("./models/my model/", "my-model-lprod-p4"),
        ("C:\\models\\bert", "bert-lprod-p4"),
        (".", "mine-lprod-p4"),  # that of the current folder
        ("../mine/sub/..", "mine-lprod-p4"),
    ],
)
def test_names_of_outputs(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert default_output_name(name, "lprod-p4") == expected


def test_texts_are_shortened_whatever_the_settings_are_called(tmp_path: Path) -> None:
    files = [tmp_path / f"sentence_{name}_config.json" for name in ("bert", "xlm-roberta")]
    for file in files:
        file.write_text('{"max_seq_length": 60}')
    shorten_texts(tmp_path, 12)
    assert [json.loads(file.read_text()) for file in files] == 2 * [{"max_seq_length": 12}]


def test_the_package_exports_what_it_says() -> None:
    from tcompress import models

    assert all(getattr(models, name) is not None for name in models._HOMES)
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        _ = models.nothing


def test_a_stand_in_of_the_hub_opens_as_a_model(hub: Mock, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub.return_value = str(tmp_path / commit)
    save("bert_base", tmp_path / commit)
    model = SourceModel.open("minilm", revision="main")
    assert model.id == "sentence-transformers/all-MiniLM-L6-v2"
    assert model.revision == commit


# ---------------------------------------------------------------- without network
@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[object]]:
    """Makes look-ups of names end as told, the last way from then on; lists what was asked."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tcompress.models.names.AGAIN", 0)

    def ending(*ways: int | None) -> list[object]:
        asked: list[object] = []

        def getaddrinfo(host: object, *_: Any, **__: Any) -> list[Any]:
            asked.append(host)
            way = ways[min(len(asked), len(ways)) - 1]
            if way is not None:
                raise socket.gaierror(way, "made up")
            return []

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return asked

    return ending


@pytest.mark.parametrize(("way", "times"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 2)])
def test_a_hub_without_address_is_not_asked_again_and_again(
    way: int, times: int, looked_up: Callable[..., list[object]]
) -> None:
    asked = looked_up(way)
    with pytest.raises(DataError, match=r"no file or folder `some-org/some-data`.* reach"):
        opened("some-org/some-data", "train").__enter__()
    with pytest.raises(SourceError, match="the hub cannot be reached"):
        resolve("some-org/some-model")
    assert asked == ["huggingface.co"] * 2 * times
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("ways", [(None,), (socket.EAI_AGAIN, None)])
def test_a_hub_with_an_address_is_asked_as_often_as_it_takes(
    ways: tuple[int | None, ...], looked_up: Callable[..., list[object]]
) -> None:
    asked = looked_up(*ways)
    with cached_where_unreachable():
        assert not constants.HF_HUB_OFFLINE
    assert len(asked) == len(ways)


def test_a_proxy_looks_names_up(
    looked_up: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = looked_up(socket.EAI_NONAME)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    with cached_where_unreachable():
        assert not constants.HF_HUB_OFFLINE
    assert asked == []
    monkeypatch.setenv("no_proxy", "huggingface.co")
    with cached_where_unreachable():
        assert constants.HF_HUB_OFFLINE
