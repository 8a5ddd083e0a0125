from pathlib import Path

from server.metrics_table import table

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_document_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == table(), "run python -m server.metrics_table > docs/metrics.md"


def test_rows_tell_type_labels_and_meaning() -> None:
    rows = [line for line in table().splitlines() if line.startswith("| `fovea_")]
    assert len(rows) > 60
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4
        assert cells[1] in ("counter", "gauge", "histogram")
        assert (cells[1] == "counter") == cells[0].endswith("_total`")
        assert cells[3].endswith(".")
    (misses,) = [row for row in rows if "`fovea_graph_misses_total`" in row]
    assert "`graph`: encoder, decoder" in misses
    assert "too_large" in misses
    (replays,) = [row for row in rows if "`fovea_graph_replays_total`" in row]
    assert "`bucket`" in replays
