"""From a seed and an index to a whole task: the bug, its package, and enough data files to read for long."""

import random
from collections.abc import Iterator

from tasks.sample import boundary_bugs, collection_bugs, numeric_bugs, state_bugs, text_bugs
from tasks.sample.bugs import DOMAINS, Domain, Family, SampleTask, code

FAMILIES: tuple[Family, ...] = (
    boundary_bugs.off_by_one,
    state_bugs.mutable_default,
    text_bugs.split_too_often,
    numeric_bugs.even_median,
    collection_bugs.wrong_sort_key,
    boundary_bugs.missing_wraparound,
    numeric_bugs.conversion_factor,
    state_bugs.shared_alias,
    boundary_bugs.strict_threshold,
    numeric_bugs.wrong_operator,
    boundary_bugs.dropped_remainder,
    text_bugs.repeated_separator,
    numeric_bugs.floor_division,
    collection_bugs.wrong_eviction,
)

_ROWS_PER_FILE = 400
_MAX_TESTED_ROWS = 400  # pytest takes about a millisecond per parametrised test
_CHARS_PER_ROW = 53  # measured, 51 to 55 over the domains
_PLACES = ("north", "south", "east", "west", "upper", "lower", "inner", "outer")
_STATES = ("open", "done", "late", "held", "lost", "sent")


def make_task(index: int, seed: int, *, bulk_chars: int) -> SampleTask:
    """Task number `index` of a seed. Family and domain pairs repeat only after 280 tasks; numbers vary always.

    `bulk_chars` is about how many characters of data files the repository holds, so that long runs have
    something to read.
    """
    rng = random.Random(f"{seed}/task/{index}")
    family = FAMILIES[index % len(FAMILIES)]
    domains = random.Random(f"{seed}/domains/{index % len(FAMILIES)}").sample(DOMAINS, len(DOMAINS))
    domain = domains[index // len(FAMILIES) % len(DOMAINS)]
    bug = family(domain, rng)
    hidden_name = f"tests/test_{bug.module}_hidden.py"
    files = {
        "pyproject.toml": _project_file(domain),
        "README.md": _readme(domain, bug.module),
        f"{domain.package}/__init__.py": f'"""Tools for the {domain.package}."""\n',
        f"{domain.package}/records.py": _records_module(domain),
        f"{domain.package}/{bug.module}.py": bug.source,
        f"tests/test_{bug.module}.py": bug.tests,
        "tests/test_records.py": _records_test(domain),
        **_data_files(domain, rng, n_rows=max(20, bulk_chars // _CHARS_PER_ROW)),
    }
    return SampleTask(
        instance_id=f"sample__{bug.family}-{index:04d}",
        domain=domain,
        bug=bug,
        files=dict(sorted(files.items())),
        hidden_files={hidden_name: bug.hidden_tests},
    )


def _project_file(domain: Domain) -> str:
    return code(f"""
        [project]
        name = "{domain.package}"
        version = "0.1.0"

        [tool.pytest.ini_options]
        testpaths = ["tests"]
    """)


def _readme(domain: Domain, module: str) -> str:
    return code(f"""
        # {domain.package}

        Small tools for the {domain.package}.

        - `{domain.package}/{module}.py`: what the {domain.items} need most
        - `{domain.package}/records.py`: reads the records of all {domain.items} from `data/`
        - `data/`: one CSV file per quarter
        - `tests/`: run them with `python -m pytest`
    """)


def _records_module(domain: Domain) -> str:
    return code(f'''
        """The records of all {domain.items}, as they lie in data/."""

        import csv
        from pathlib import Path

        DATA = Path(__file__).parent.parent / "data"


        def load_rows(start=0, stop=None):
            """Return the rows of all files in order, as dicts, from start up to stop."""
            rows = []
            for path in sorted(DATA.glob("*.csv")):
                with path.open(newline="") as handle:
                    rows.extend(csv.DictReader(handle))
            return rows[start:stop]
    ''')


def _records_test(domain: Domain) -> str:
    return code(f"""
        import pytest

        from {domain.package}.records import load_rows

        ROWS = load_rows(0, {_MAX_TESTED_ROWS})


        @pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
        def test_row_is_complete(row):
            assert all(row.values())
            assert int(row["{domain.field}"]) > 0
    """)


def _data_files(domain: Domain, rng: random.Random, *, n_rows: int) -> dict[str, str]:
    files = {}
    for number, start in enumerate(range(0, n_rows, _ROWS_PER_FILE)):
        rows = _rows(domain, rng, start, min(start + _ROWS_PER_FILE, n_rows))
        header = f"name,place,{domain.field},state,date,note\n"
        files[f"data/quarter_{number:02d}.csv"] = header + "".join(rows)
    return files


def _rows(domain: Domain, rng: random.Random, start: int, stop: int) -> Iterator[str]:
    for index in range(start, stop):
        date = f"{2015 + index // 365}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        yield (
            f"{domain.item}-{index:05d},{rng.choice(_PLACES)},{rng.randint(1, 999)},"
            f"{rng.choice(_STATES)},{date},checked by {rng.randint(100, 999)}\n"
        )
