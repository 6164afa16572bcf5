"""What was read on earlier nights: which file holds which runs, and where their rows lie. SQLite beside the store.

Rows lie in segments, Arrow streams written once. A file whose size and times are unchanged is not opened again; a
removed file simply is not asked for. Everything here can be deleted: it is then read anew.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from operator import attrgetter
from pathlib import Path

import orjson

from tasks.catalog_rows import RUN_FIELDS, FileNotes, RunEntry
from tasks.input_files import InputFile
from tasks.memory_files import remove
from tasks.segments import Place, Segment

_NAME = "catalog.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    file TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT, notes TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS runs (
    file TEXT NOT NULL, seq INTEGER NOT NULL, segment TEXT NOT NULL, row INTEGER NOT NULL,
    trajectory_id TEXT NOT NULL, task_id TEXT NOT NULL, source_path TEXT NOT NULL, source_format TEXT NOT NULL,
    status TEXT NOT NULL, source TEXT NOT NULL, score REAL, exit_status TEXT,
    n_messages INTEGER, n_turns INTEGER, n_calls INTEGER, n_observations INTEGER, n_unpaired INTEGER, n_chars INTEGER,
    tail TEXT, PRIMARY KEY (file, seq)
);
CREATE TABLE IF NOT EXISTS segments (
    name TEXT PRIMARY KEY, n_rows INTEGER NOT NULL, n_bytes INTEGER NOT NULL, sha256 TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tables (plan TEXT PRIMARY KEY, n_rows INTEGER NOT NULL, sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS openings (digest TEXT, file TEXT, seq INTEGER);
CREATE INDEX IF NOT EXISTS openings_by_digest ON openings (digest);
CREATE INDEX IF NOT EXISTS openings_by_file ON openings (file);
"""

_FIELDS_OF = attrgetter(*RUN_FIELDS)
_JOINED = ("status", "source", "score", "exit_status")
"""What side files may know better."""


class Catalog:
    """One open catalog. What is recorded between two commits is recorded whole or not at all."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def begin(self) -> None:
        """A new list of the files that are asked for."""
        self._db.execute("CREATE TEMP TABLE wanted (position INTEGER PRIMARY KEY, file TEXT UNIQUE)")
        self._db.execute(
            "CREATE TEMP TABLE kept (place INTEGER PRIMARY KEY, run INTEGER UNIQUE, status TEXT, source TEXT, "
            "score REAL, exit_status TEXT)"
        )

    def want(self, file: InputFile) -> bool:
        """Asks for a file; True when it was read before and has not changed."""
        self._db.execute("INSERT OR IGNORE INTO wanted (file) VALUES (?)", (file.name,))
        row = self._db.execute("SELECT stamp, digest FROM files WHERE file = ?", (file.name,)).fetchone()
        if row is None or row[0] != file.stamp or file.dataset is not None or file.problem is not None:
            return False
        try:
            return row[1] is None or row[1] == file.digest()
        except OSError:
            return False

    def forget(self, name: str) -> None:
        for table in ("files", "runs", "openings"):
            self._db.execute(f"DELETE FROM {table} WHERE file = ?", (name,))

    def put(
        self,
        file: InputFile,
        digest: str | None,
        notes: FileNotes,
        runs: Iterable[RunEntry],
        openings: Sequence[tuple[str, int]],
        was_read: bool = True,
    ) -> None:
        """Records a file with everything that it gave, in place of what it gave before. `digest`: of a file so new that
        its stamp does not vouch for its content; None for the others. One that could not be read is tried again.
        """
        stamp = file.stamp if was_read else ""
        if self._db.execute("SELECT 1 FROM files WHERE file = ?", (file.name,)).fetchone():
            self.forget(file.name)
        said = orjson.dumps(vars(notes)).decode() if any(vars(notes).values()) else ""
        self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (file.name, stamp, digest, said))
        marks = ", ".join("?" * len(RUN_FIELDS))
        self._db.executemany(f"INSERT INTO runs VALUES ({marks})", [_FIELDS_OF(run) for run in runs])
        if openings:
            self._db.executemany(
                "INSERT INTO openings VALUES (?, ?, ?)", [(digest, file.name, seq) for digest, seq in openings]
            )

    def commit(self) -> None:
        """Makes what was recorded so far last, so that an interrupted night is not read again."""
        self._db.commit()
        self._db.execute("BEGIN IMMEDIATE")

    def notes(self) -> Iterator[FileNotes]:
        """Notes of the wanted files, in order; files without any are left out."""
        rows = self._db.execute("SELECT notes FROM wanted JOIN files USING (file) WHERE notes != '' ORDER BY position")
        for (text,) in rows:
            yield FileNotes(**orjson.loads(text))

    def keep_all(self) -> None:
        """Starts with every run of the wanted files, in order, and with what the logs themselves say of them."""
        self._db.execute(
            "INSERT INTO kept (run, status, source, score, exit_status) "
            "SELECT runs.rowid, status, source, score, exit_status "
            "FROM wanted JOIN runs USING (file) ORDER BY position, seq"
        )

    def kept(self, *, by_task: bool = False) -> Iterator[tuple[int, RunEntry]]:
        """(place in the table, run) of the runs that stay, with their joined outcomes; in order, or by task."""
        columns = ", ".join(f"{'kept' if name in _JOINED else 'runs'}.{name}" for name in RUN_FIELDS)
        order = "runs.task_id, kept.status, place" if by_task else "place"
        rows = self._db.execute(f"SELECT place, {columns} FROM kept JOIN runs ON runs.rowid = run ORDER BY {order}")
        for place, *values in rows:
            yield place, RunEntry(*values)

    def join(self, joined: Iterable[tuple[int, RunEntry]]) -> None:
        """Records outcomes and exit statuses that side files know."""
        self._db.executemany(
            "UPDATE kept SET status = ?, source = ?, score = ?, exit_status = ? WHERE place = ?",
            ([*(getattr(run, name) for name in _JOINED), place] for place, run in joined),
        )

    def drop(self, places: Iterable[int]) -> None:
        """These runs do not stay."""
        self._db.executemany("DELETE FROM kept WHERE place = ?", ((place,) for place in places))

    _DOUBT = "CASE WHEN kept.status = 'unknown' THEN 2 ELSE kept.source IN ('agent', 'none') END"
    """What tests, rewards and scorers say comes before claims, and these before nothing."""
    _CONTRADICTED = f"""
        SELECT trajectory_id FROM (
            SELECT runs.trajectory_id, kept.status,
                   rank() OVER (PARTITION BY runs.trajectory_id ORDER BY {_DOUBT}) AS number
            FROM kept JOIN runs ON runs.rowid = run
        ) WHERE number = 1 GROUP BY trajectory_id HAVING count(DISTINCT status) > 1
    """
    _SAME = f"""
        SELECT place, source_path, kept_path FROM (
            SELECT place, runs.source_path,
                   row_number() OVER same AS number, first_value(runs.source_path) OVER same AS kept_path
            FROM kept JOIN runs ON runs.rowid = run
            WINDOW same AS (PARTITION BY runs.trajectory_id
                            ORDER BY {_DOUBT}, runs.n_messages DESC, place)
        ) WHERE number > 1
    """
    _OPENING = """
        SELECT kept.place, runs.source_path, longer.source_path
        FROM kept JOIN runs ON runs.rowid = kept.run
        JOIN openings ON openings.digest = runs.tail
        JOIN runs AS longer ON longer.file = openings.file AND longer.seq = openings.seq
        JOIN kept AS other ON other.run = longer.rowid
        WHERE longer.n_messages > runs.n_messages
        GROUP BY kept.place
    """

    def drop_contradicted_outcomes(self) -> set[int]:
        """The places of equal runs of which one is said to have succeeded and another to have failed: unknown now."""
        rows = self._db.execute(
            f"SELECT place FROM kept JOIN runs ON runs.rowid = run WHERE trajectory_id IN ({self._CONTRADICTED})"
        )
        places = {place for (place,) in rows}
        self._db.executemany(
            "UPDATE kept SET status = 'unknown', source = 'none', score = NULL WHERE place = ?",
            ((place,) for place in places),
        )
        return places

    def repeats(self) -> list[tuple[int, str, str]]:
        """(place, path, path of the one that stays): equal runs, and earlier states of a growing conversation."""
        return [*self._db.execute(self._SAME), *self._db.execute(self._OPENING)]

    def totals(self) -> dict[str, int]:
        """Sums over the runs that stay."""
        names = ("n_turns", "n_calls", "n_observations", "n_unpaired")
        sums = ", ".join(f"coalesce(sum({name}), 0)" for name in names)
        row = self._db.execute(f"SELECT count(*), {sums} FROM kept JOIN runs ON runs.rowid = run").fetchone()
        return dict(zip(("n_runs", *names), row, strict=True))

    def counts(self, what: str) -> dict[str, int]:
        """How many of the runs that stay have which value of a field (one of RUN_FIELDS); none where there is none."""
        column = f"{'kept' if what in _JOINED else 'runs'}.{what}"
        return dict(
            self._db.execute(
                f"SELECT {column}, count(*) FROM kept JOIN runs ON runs.rowid = run "
                f"WHERE {column} IS NOT NULL AND {column} != '' GROUP BY {column} ORDER BY count(*) DESC, min(place)"
            )
        )

    def segments(self) -> dict[str, Segment]:
        return {name: Segment(name, *values) for name, *values in self._db.execute("SELECT * FROM segments")}

    def put_segment(self, segment: Segment) -> None:
        """Records a segment, or how far it has been written."""
        self._db.execute(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)",
            (segment.name, segment.n_rows, segment.n_bytes, segment.sha256),
        )

    def forget_segment(self, name: str) -> None:
        """Forgets a segment, with the files that have a row in it: they are read anew."""
        for (file,) in self._db.execute("SELECT DISTINCT file FROM runs WHERE segment = ?", (name,)).fetchall():
            self.forget(file)
        self._db.execute("DELETE FROM segments WHERE name = ?", (name,))

    def mostly_dead_segments(self) -> list[str]:
        """Segments of which less than half of the rows are still some file's."""
        rows = self._db.execute(
            "SELECT name FROM segments LEFT JOIN runs ON runs.segment = name "
            "GROUP BY name HAVING count(runs.file) * 2 < n_rows"
        )
        return [name for (name,) in rows]

    def places(self) -> Iterator[Place]:
        """Where the rows of the table lie, in order."""
        for row in self._db.execute(
            "SELECT segment, row, kept.status, kept.source, kept.score, kept.exit_status "
            "FROM kept JOIN runs ON runs.rowid = run ORDER BY place"
        ):
            yield Place(*row)

    def finished_segment(self) -> Segment | None:
        """The segment that is the table as it lies there: all its rows stay, in order, and say what the table says."""
        joined = " AND ".join(f"kept.{name} IS runs.{name}" for name in _JOINED)
        row = self._db.execute(
            f"SELECT segments.* FROM segments WHERE sha256 != '' AND n_rows = (SELECT count(*) FROM kept) "
            f"AND n_rows = (SELECT count(*) FROM kept JOIN runs ON runs.rowid = run "
            f"WHERE segment = name AND row = place - 1 AND {joined})"
        ).fetchone()
        return None if row is None else Segment(*row)

    def known_table(self, plan: str) -> tuple[int, str] | None:
        """(number of rows, sha256) of the table that was made by a plan."""
        return self._db.execute("SELECT n_rows, sha256 FROM tables WHERE plan = ?", (plan,)).fetchone()

    def put_table(self, plan: str, n_rows: int, sha256: str) -> None:
        """Records the newest table; earlier ones are forgotten."""
        self._db.execute("DELETE FROM tables")
        self._db.execute("INSERT INTO tables VALUES (?, ?, ?)", (plan, n_rows, sha256))

    def forget_missing(self) -> None:
        """Forgets files that nobody asked for and that are on disk no more."""
        others = self._db.execute("SELECT file FROM files WHERE file NOT IN (SELECT file FROM wanted)").fetchall()
        for (name,) in others:
            if _is_gone(name):
                self.forget(name)


def _is_gone(name: str) -> bool:
    """False also for what cannot be looked at: it is there, or nobody knows."""
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte
        return True
    except OSError:
        return False
    return False


def delete_catalog(folder: Path) -> None:
    """What the catalog in `folder` knew is read anew."""
    remove(folder / _NAME)
    for segment in folder.glob("*.arrow"):
        segment.unlink(missing_ok=True)


@contextmanager
def open_catalog(folder: Path) -> Iterator[Catalog]:
    """The catalog in `folder`, for one process at a time; a second one waits.

    Raises:
        sqlite3.DatabaseError: the system refuses, or the file is damaged (also while it is in use).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(folder / _NAME, timeout=3600)) as connection:
        connection.executescript(_TABLES)
        connection.execute("BEGIN IMMEDIATE")
        catalog = Catalog(connection)
        catalog.begin()
        yield catalog
        connection.commit()
