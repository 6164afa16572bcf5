"""Arrow tables: what is written is read back, by us and by `datasets`, and what is damaged is refused."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from artifacts.tables import iter_rows, open_table, write_table
from schemas.errors import ArtifactError
from schemas.tables import PAIRS


def row(number: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {field.name: number for field in PAIRS if not str(field.type).startswith("large_string")}
    return {name: f"{name}-{number}" for name in PAIRS.names} | numbers


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.arrow"
    assert write_table(path, PAIRS, (row(n) for n in range(10)), rows_per_batch=3) == 10
    return path


def test_rows_come_back(table: Path):
    assert list(iter_rows(open_table(table))) == [row(n) for n in range(10)]


def test_datasets_opens_it_as_it_is(table: Path):
    opened = datasets.Dataset.from_file(str(table))
    assert opened.num_rows == 10
    assert opened[7]["pair_id"] == "pair_id-7"


def test_a_cut_table_is_refused_wherever_it_is_cut(table: Path):
    whole = table.read_bytes()
    for length in range(0, len(whole), 8):
        table.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"pairs\.arrow"):
            open_table(table)


def test_a_table_of_another_schema_is_refused(tmp_path: Path):
    path = tmp_path / "other.arrow"
    write_table(path, PAIRS.remove_metadata(), [row(0)])
    with pytest.raises(ArtifactError, match="not a table that this version of traceforge writes"):
        open_table(path)


def test_a_missing_table_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match="No such file"):
        open_table(tmp_path / "none.arrow")
