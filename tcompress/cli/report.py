"""`tcompress report`."""

from __future__ import annotations

from tcompress.cli.first_look import first_look, reach
from tcompress.cli.terminal import print_json, results, tell, tell_written
from tcompress.errors import counted
from tcompress.options.commands import Manner, Reported, Tables, Trust

EXAMPLES = (
    "tcompress report bert-base-lprod-p4",
    "tcompress report bert-base bert-base-lprod-p4 bert-base-svd-25 --length 256",
    "tcompress report bert-base-lprod-p4 --json > report.json",
    "tcompress report bert-base-lprod-p4 bert-base-svd-25 --html report.html",
    "tcompress report minilm minilm-svd-25 --csv all.csv --latex table.tex --figures drawn",
)


def report(call: Reported, tables: Tables, trust: Trust, manner: Manner) -> None:
    """Does what `tcompress report` says."""
    with first_look() as look:
        look.tables(tables, call.html, call.figures)
        look.models(*call.models)
    reach(*call.models)
    from tcompress.reporting import table_files
    from tcompress.reporting.console import render
    from tcompress.reporting.model_report import reports_of
    from tcompress.reporting.page import write_html

    reports = reports_of(call.models, call.length, trust_remote_code=trust.allow_remote_code)
    written: dict[str, str | list[str]] = {}
    if call.html is not None:
        written["html"] = str(write_html(reports, call.html))
    sheet, printed = table_files.report_sheet(reports), table_files.report_table(reports)
    written |= table_files.write_tables(tables, sheet, printed)
    if call.figures is not None:
        written["figures"] = list(map(str, table_files.write_figures(reports, call.figures)))
    if manner.as_json:
        print_json({"reports": [item.to_json() for item in reports], **written})
        return
    results().print(render(reports, per_layer=call.layers))
    tell_written(path for path in written.values() if isinstance(path, str))
    if call.figures is not None:
        tell(f"Wrote {counted(len(written['figures']), 'picture')} to `{call.figures}`.")
