"""`tcompress report`."""

from __future__ import annotations

from pathlib import Path

from tcompress.cli.first_look import first_look, reach
from tcompress.cli.terminal import print_json, results, tell
from tcompress.options.commands import Manner, Reported, Trust

EXAMPLES = (
    "tcompress report bert-base-lprod-p4",
    "tcompress report bert-base bert-base-lprod-p4 bert-base-svd-25 --length 256",
    "tcompress report bert-base-lprod-p4 --json > report.json",
    "tcompress report bert-base-lprod-p4 bert-base-svd-25 --html report.html",
)


def report(call: Reported, trust: Trust, manner: Manner) -> None:
    """Does what `tcompress report` says."""
    html = None if call.html is None else Path(call.html)
    with first_look() as look:
        look.page(call.html)
        look.models(*call.models)
    reach(*call.models)
    from tcompress.reporting.console import render
    from tcompress.reporting.model_report import reports_of
    from tcompress.reporting.page import write_html

    reports = reports_of(call.models, call.length, trust_remote_code=trust.allow_remote_code)
    written = {} if html is None else {"html": str(write_html(reports, html))}
    if manner.as_json:
        print_json({"reports": [item.to_json() for item in reports], **written})
        return
    results().print(render(reports, per_layer=call.layers))
    if html is not None:
        tell(f"Wrote `{html}`.")
