"""The page of compiled rounds is that of its lines."""

import json

from benchmarks.compiled.page import RESULTS, page


def test_the_page_is_the_table_of_the_lines():
    lines = (RESULTS / "compiled.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({(row["workload"], row["target"]) for row in rows}) == len(rows)
    assert (RESULTS / "compiled.md").read_text(encoding="utf-8") == page(rows)
