"""The page: complete, self-contained, and safe against what names may hold."""

from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from tcompress.artifact.manifest import Alternative, Interval
from tcompress.errors import DiskError
from tcompress.reporting.model_report import report_of, with_baselines
from tcompress.reporting.overview_charts import map_of
from tcompress.reporting.page import code, heat_of, render_html, write_html
from tcompress.reporting.table_rows import rows_of
from tcompress.reporting.tree import ModelReport
from tests.support.cli import run
from tests.support.converted import converted
from tests.support.records import metric, onnx_file, record, record_dense, speed, training

MAP = "parameters kept of every layer"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements of a page, which must be nested properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def charts(self) -> list[str]:
        return [str(found["aria-label"]) for name, found in self.tags if name == "svg"]

    def assert_alone(self) -> None:
        """Nothing refers to anything outside the file, and nothing runs."""
        assert not {"script", "link", "img", "iframe", "object", "use"} & {
            name for name, _ in self.tags
        }
        ids = {found["id"] for _, found in self.tags if "id" in found}
        for _, found in self.tags:
            assert not {"src", "srcset", "data", "action", "xlink:href"} & set(found)
            assert not [name for name in found if name.startswith("on")]
            if "href" in found:
                assert str(found["href"])[0] == "#"
                assert str(found["href"])[1:] in ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    converted("gpt2", folder)
    return folder


@pytest.fixture(scope="module")
def bare(folder: Path) -> ModelReport:
    return report_of(folder / "gpt2-small", 16)


def full(bare: ModelReport) -> ModelReport:
    records = {
        "metrics": (metric(), metric(5.0, 4.0, name="perplexity", higher_is_better=False)),
        "training": (training(), training(1)),
        "speed": (speed(1), speed(8), speed(8, mode="compiled")),
        "errors": {"held_out": 0.2},
    }
    return bare.model_copy(update=records)


def test_a_model_without_records(bare: ModelReport) -> None:
    page = Page(render_html([bare]))
    page.assert_alone()
    assert [chart.partition(":")[0] for chart in page.charts()] == [MAP]
    assert page.text.count("gpt2-small") >= 3
    assert "Weight error by layer" in page.text
    assert "lprod p=4 dct" in page.text
    assert "name: lprod" in page.text
    assert "not healed" in page.text
    left = "unchanged: embeddings 5.25 k, norms and biases 768."
    line = f"Rewritten: 16.4 k of 22.4 k parameters (73 %); {left}"
    assert line in page.text
    older = bare.model_copy(update={"coverage": None})  # of a version without it
    assert line not in Page(render_html([older])).text
    assert "Speed – not timed" in page.text
    assert "Quality – not measured" in page.text
    assert "<h3>Speed" not in render_html([bare])


def test_where_all_parameters_are(bare: ModelReport) -> None:
    page = Page(render_html([bare]))
    assert "Where the parameters are" in page.text
    parts = bare.parameters
    for part in ("dense", "now"):
        rest = getattr(parts.blocks, part) - getattr(parts.rewritten, part)
        shown = [getattr(item, part) for item in (parts.rewritten, parts.embeddings, parts.other)]
        assert sum(shown) + rest == getattr(parts.total, part)
        for number in (*shown, rest):
            assert f"{number:,}" in page.text
    assert "dense model" in page.text  # its column
    assert f"{parts.embeddings.dense / parts.total.dense:.1%} of the model" in page.text
    columns = "parameters bytes multiply-adds per token"
    assert columns in page.text
    plain = [layer.model_copy(update={"macs": layer.parameters}) for layer in bare.layers]
    page = Page(render_html([bare.model_copy(update={"layers": tuple(plain)})]))
    assert columns not in page.text
    assert "Multiply-adds per token are as many as parameters." in page.text


def test_shades_span_the_errors_that_there_are(bare: ModelReport) -> None:
    layers = [
        layer.model_copy(update={"errors": {"weight": 0.50 + 0.01 * index}})
        for index, layer in enumerate(bare.layers)
    ]
    heat = heat_of(layers)
    shades = {cell.value: cell.shade for _, row in heat.rows for cell in row if cell}
    assert shades[min(shades)] < 10
    assert shades[max(shades)] > 55
    assert heat.least == min(shades)


def test_equal_errors_have_no_shades(bare: ModelReport) -> None:
    alike = [
        layer.model_copy(update={"errors": {"weight": 0.32061 + 1e-6 * index}})
        for index, layer in enumerate(bare.layers)
    ]
    text = Page(render_html([bare.model_copy(update={"layers": tuple(alike)})])).text
    assert "all are 0.3206." in text
    assert "Shades" not in text


def test_the_top_says_smaller_faster_and_what_is_lost(bare: ModelReport) -> None:
    """In this order, before anything else: no table comes before the pictures."""
    text = render_html([full(bare)])
    places = [text.index(word) for word in ("<dt>Size", "<dt>Speed", "<dt>Quality", "<svg")]
    assert [*places, text.index("<table")] == sorted([*places, text.index("<table")])
    words = Page(text).text
    assert "Size 44.2 kB 49.3% of the dense 89.6 kB" in words
    assert "Speed 2.00× 5.00 ms; dense 10.0 ms batch 8, length 32, cpu" in words
    assert "Quality 94.4% of the dense model's accuracy: 0.8500 of 0.9000" in words
    assert "gpt2-small is 2.0× smaller, runs at 2.00× the dense speed and keeps 94.4%" in words


def test_a_noisy_time_is_never_the_figure_where_a_calm_one_is_there(bare: ModelReport) -> None:
    calm, wild = speed(8), speed(32, milliseconds=2.0, ratio=5.0, spread=0.5)
    for speeds, figure in (((calm, wild), "2.00×"), ((wild,), "5.00× ?")):
        top, _, rest = render_html([bare.model_copy(update={"speed": speeds})]).partition("<main>")
        assert f'<span class="value">{figure}</span>' in top
        assert f"<td>{figure}<small>" in rest.partition("</table>")[0]  # the summary


def test_dense_at_int8_stands_beside_ours(bare: ModelReport) -> None:
    eager, ours = speed(8), speed(8, mode="onnx-int8", ratio=5.0, same_runtime_milliseconds=4.0)
    facts = {"exports": (onnx_file(8, 9_100_000),), "dense_exports": (onnx_file(8, 23_300_000),)}
    page = Page(render_html([full(bare).model_copy(update={**facts, "speed": (eager, ours)})]))
    assert "Size 9.1 MB" in page.text
    assert "dense at int8 23.3 MB in PyTorch 44.2 kB" in page.text
    assert "Speed 5.00×" in page.text
    assert "dense at int8 2.50× in PyTorch 2.00×" in page.text
    assert (
        "in PyTorch keeps 94.4% of the dense model's accuracy" in page.text
    )  # of the file unknown
    time, size = page.charts()[:2]
    unknown = "quality not measured"
    assert time.endswith(f"dense int8: 4 ms, {unknown}; A int8: 5 ms, {unknown}")
    assert size.endswith(f"dense int8: 23.3 MB, {unknown}; A int8: 9.1 MB, {unknown}")


def test_the_top_is_about_the_file_that_ships(bare: ModelReport) -> None:
    eager, ours = speed(8), speed(8, mode="onnx-int8", milliseconds=2.0, ratio=5.0)
    model = full(bare)
    (number, *_) = model.metrics
    worse = number.model_copy(update={"value": 0.8})
    file = onnx_file(8, 9_100).model_copy(update={"metrics": [worse]})
    shipped = model.model_copy(update={"exports": (file,), "speed": (eager, ours)})
    page = Page(render_html([shipped]))
    assert "in its int8 file is 9.8× smaller, runs at 5.00× the dense speed" in page.text
    assert "2.00 ms in ONNX Runtime; dense in PyTorch 10.0 ms" in page.text
    assert "Quality 88.9% of the dense model's accuracy: 0.8000 of 0.9000" in page.text
    assert "in PyTorch 94.4%" in page.text
    assert "gpt2-small int8: 2 ms, 0.8" in page.charts()[0]
    line = next(row for row in rows_of(shipped) if row.label == "  accuracy of int8 file")
    assert line.value == "0.8000"
    alone = shipped.model_copy(update={"metrics": ()})  # nothing was measured in PyTorch
    time, size = Page(render_html([alone])).charts()[:2]
    assert "gpt2-small: 2 ms, 0.8" in time
    assert "gpt2-small: 9.1 kB, 0.8" in size


def test_alternatives_that_were_measured_are_in_pictures_and_a_table(bare: ModelReport) -> None:
    facts = [("dense", "torch", 89_600, 1.0, 0.9), ("dense", "onnx-int8", 23_000, 4.0, 0.89)]
    facts += [("2 of 6 layers, not healed", "onnx-int8", 9_000, 8.0, 0.7)]
    names = ("name", "runtime", "bytes", "ratio", "value")
    beside = tuple(Alternative.model_validate(dict(zip(names, one, strict=True))) for one in facts)
    eager = speed(8, same_runtime_milliseconds=4.0)
    model = full(bare).model_copy(update={"speed": (eager,), "alternatives": beside})
    page = Page(render_html([model]))
    time, size = page.charts()[:2]
    assert "dense int8: 2.5 ms, 0.89" in time
    assert "2 of 6 layers, not healed int8: 1.25 ms, 0.7" in time
    assert "dense int8: 23.0 kB, 0.89" in size
    assert "2 of 6 layers, not healed onnx-int8 9.0 kB 8.00× 0.7000 0.778×" in page.text
    assert "2 of 6" not in Page(render_html([model, bare])).charts()[0]
    # Of other examples, the numbers are not drawn beside those of these.
    other = (beside[0].model_copy(update={"value": 0.8}), *beside[1:])
    drawn = Page(render_html([model.model_copy(update={"alternatives": other})])).charts()
    assert "2 of 6" not in drawn[0]


def test_files_of_a_dense_model_are_lent_to_what_was_made_of_it(
    bare: ModelReport, folder: Path
) -> None:
    dense = report_of(folder / "gpt2", 16)
    files = (onnx_file(8, 100),)
    own = {"source": bare.source, "exports": files}
    assert with_baselines([bare, dense.model_copy(update=own)])[0].dense_exports == files
    assert with_baselines([bare, dense])[0].dense_exports == ()


def test_dropped_blocks_are_in_the_picture_of_layers(tmp_path: Path) -> None:
    report = report_of(converted("gpt2", tmp_path, keep_layers=[1]).folder)
    text = str(map_of(report))
    assert "dropped: 0" in text
    assert "o, block 1: 25.0% kept, lprod p=4 dct" in text


def test_a_model_with_metrics_only(bare: ModelReport) -> None:
    page = Page(render_html([bare.model_copy(update={"metrics": (metric(),)})]))
    page.assert_alone()
    assert page.charts()[0] == (
        "accuracy against bytes on disk. gpt2-small: 44.2 kB, 0.8500; dense (gpt2): 89.6 kB, 0.9000"
    )
    assert "0.8300 … 0.8700" in page.text
    assert "−0.0600 … −0.0400" in page.text
    assert "How accuracy was measured" in page.text


def test_a_model_with_everything(bare: ModelReport) -> None:
    text = render_html([full(bare)])
    page = Page(text)
    page.assert_alone()
    assert [chart.partition(".")[0] for chart in page.charts()] == [
        "accuracy against time of a pass (batch 8, length 32, cpu, 2 threads, float32)",
        "accuracy against bytes on disk",
        f"{MAP}: from 25",
        "training loss",
        "validation: accuracy",
    ]
    assert page.charts()[4].endswith("best 0.8000 at step 200")
    assert "400 steps in 2 min · 3.2 k examples, 64 k tokens · sst2 · taught by big" in page.text
    assert "perplexity (lower is better)" in page.text
    assert "8 32 eager cpu, 2 threads, float32 5.00 ms 10.0 ms 2.00×" in page.text
    assert len(text) < 1_000_000
    assert text == render_html([full(bare)])


def test_models_side_by_side(bare: ModelReport, folder: Path) -> None:
    other = full(bare).model_copy(update={"name": "other", "metrics": (metric(0.7),)})
    dense = report_of(folder / "gpt2", 16).model_copy(update={"metrics": (metric(0.9, None),)})
    page = Page(render_html([full(bare), other, dense]))
    page.assert_alone()
    time, size = page.charts()[:2]
    assert size.endswith(
        "gpt2-small: 44.2 kB, 0.8500; other: 44.2 kB, 0.7000; gpt2: 92.2 kB, 0.9000"
    )
    # The dense model has one name in both pictures, though it was timed beside others only.
    assert time.endswith("gpt2-small: 5 ms, 0.8500; other: 5 ms, 0.7000; gpt2: 10 ms, 0.9000")
    names = {str(found["href"]) for name, found in page.tags if name == "a"}
    assert names == {"#model-a", "#model-b", "#model-c"}


def test_a_dense_model_shows_what_others_were_compared_with(
    bare: ModelReport, folder: Path
) -> None:
    dense = report_of(folder / "gpt2", 16)
    own = metric(0.4, None, name="pearson")
    around = Interval(low=0.88, high=0.92)
    facts = {"baseline": str(folder / "gpt2"), "baseline_interval": around}
    compared = metric(0.85, difference=metric(0.85, 0.9).difference.model_copy(update=facts))
    converted = bare.model_copy(update={"metrics": (compared, metric(0.1, 0.2))})
    lent = with_baselines([dense.model_copy(update={"metrics": (own,)}), converted])
    assert lent[1] == converted
    assert [(item.name, item.value) for item in lent[0].metrics] == [
        ("pearson", 0.4),
        ("accuracy", 0.9),
    ]
    assert lent[0].metrics[1].interval == around
    assert lent[0].metrics[1].difference is None
    assert lent[0].metrics[1].protocol == compared.protocol
    assert "gpt2: 92.2 kB, 0.9000" in Page(render_html(lent)).charts()[0]
    elsewhere = with_baselines([dense, bare.model_copy(update={"metrics": (metric(0.1, 0.2),)})])
    assert elsewhere[0].metrics == ()


def test_models_of_several_sizes_are_compared_by_bytes(bare: ModelReport, tmp_path: Path) -> None:
    bert = report_of(converted("bert", tmp_path).folder, 16)
    both = [item.model_copy(update={"metrics": (metric(),)}) for item in (bare, bert)]
    picture = Page(render_html(both)).charts()[0]
    assert picture.startswith("accuracy against bytes on disk.")
    assert "bert-small: 51.4 kB" in picture
    assert "dense (gpt2): 89.6 kB" in picture


def test_names_are_escaped(bare: ModelReport) -> None:
    hostile = '<script>alert("1")</script>'
    found = metric(name=hostile, protocol={"data": hostile, hostile: [hostile]})
    report = full(bare).model_copy(
        update={
            "name": hostile,
            "source": hostile,
            "metrics": (found,),
            "training": (training(validation=hostile, data=hostile),),
            "recipe": {hostile: hostile},
            "environment": {hostile: hostile},
        }
    )
    text = render_html([report, bare])
    assert "<script" not in text
    page = Page(text)
    page.assert_alone()
    assert page.text.count("alert(") > 10


def test_what_stands_between_backticks_is_code() -> None:
    assert code("`a<b` & `c`") == "<code>a&lt;b</code> &amp; <code>c</code>"
    assert code("`alone <") == "`alone &lt;"


def test_long_curves_are_thinned(bare: ModelReport) -> None:
    report = bare.model_copy(update={"training": (training(20_000),)})
    assert len(render_html([report])) < 100_000


def test_tables_have_headers_and_scroll_alone(bare: ModelReport) -> None:
    page = Page(render_html([full(bare)]))
    scopes = [found.get("scope") for name, found in page.tags if name == "th"]
    assert set(scopes) <= {"col", "row", "colgroup"}
    regions = [found for _, found in page.tags if found.get("class") == "scroll"]
    assert len(regions) == page.count("table") + 1  # the layers
    assert all(found["tabindex"] == "0" and found["aria-label"] for found in regions)


def test_the_old_file_survives_a_failure(
    bare: ModelReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    full_disk = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full_disk)
        with pytest.raises(DiskError, match=r"there is no space for .*report.html`: .* are free"):
            write_html([bare], target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    assert write_html([bare], target) == target
    assert target.read_text(encoding="utf-8") == render_html([bare])


def test_the_command(folder: Path, tmp_path: Path) -> None:
    record(folder / "gpt2-small", metrics=[metric()], speed=[speed()])
    record_dense(folder / "gpt2", training=[training()])
    models = (folder / "gpt2-small", folder / "gpt2")
    done = run("report", *models, "--html", tmp_path / "a.html")
    assert (done.code, done.err) == (0, "")
    assert done.lines[-1] == f"Wrote `{tmp_path / 'a.html'}`."
    assert "#model-b" in (tmp_path / "a.html").read_text(encoding="utf-8")
    done = run("report", *models, "--html", tmp_path / "b.html", "--json")
    assert done.document["html"] == str(tmp_path / "b.html")
    assert done.document["reports"][0]["speed"][0]["ratio"] == 2.0
