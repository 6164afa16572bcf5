"""Between the command line and the person: one JSON object or a table out, one clear line for each error, exit codes.

0 done, 1 a stage failed or the system refused (a full disk, a folder without permission), 2 the input cannot be used,
130 interrupted. Only results go to stdout; the rest to stderr.
"""

import json
import logging
import os
import sqlite3
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

import typer
from pydantic import BaseModel
from rich.console import Console
from typer.core import TyperGroup

from schemas.errors import ArtifactError, StageError, UserError, system_advice
from schemas.requests import StageName
from tasks.memory_files import is_damage

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

console = Console(stderr=True)


def stage_names(given: list[str]) -> tuple[StageName, ...]:
    """Checks names of stages.

    Raises:
        UserError: there is no such stage.
    """
    known = get_args(StageName)
    for name in given:
        if name not in known:
            raise UserError(f"no stage {name!r}", where="--refresh", fix=f"one of {', '.join(known)}")
    return cast("tuple[StageName, ...]", tuple(given))


def only_config(paths: list[str]) -> Path:
    """The one configuration among the arguments of a command that takes logs as well.

    Raises:
        UserError: they are logs.
    """
    if len(paths) == 1 and paths[0].endswith(".toml"):
        return Path(paths[0])
    raise UserError("logs need a folder to write to", where=paths[0], fix="add --out DIR, or give one .toml file")


def without_config(*given: tuple[str, list[str]]) -> None:
    """Options that change a configuration, on a command line that has none.

    Raises:
        UserError: one was given.
    """
    for name, values in given:
        if values:
            raise UserError("it changes a configuration, and with --out there is none", where=name, fix="leave it out")


def given_folder(text: str) -> Path:
    """The path of an option; an empty one would be the working directory.

    Raises:
        UserError: it is empty.
    """
    if not text.strip():
        raise UserError("an empty path", where="--out", fix="give a path, or . for this folder")
    return Path(text)


def emit(result: BaseModel, as_json: bool, text: str = "") -> None:
    """The result on stdout: as one JSON object when asked for, else as text (nothing when that is empty).

    Raises:
        StageError: there is no stdout.
        OSError: it cannot be written.
    """
    said = result.model_dump_json() if as_json else text
    if said:
        _print(said)


def _print(text: str) -> None:
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  (closed by whoever started the program)
        raise StageError("the result cannot be printed: stdout is closed")
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  what is buffered would be tried again at the end
        error.filename = error.filename or "stdout"
        raise


def _complain(error: Exception, as_json: bool) -> None:
    problems = str(error).splitlines() or [type(error).__name__]
    for problem in problems:
        sys.stderr.write(f"error: {problem}\n")
    if as_json:
        with suppress(OSError, StageError):  # the error may be that of stdout
            _print(json.dumps({"error": problems[0], "errors": problems}))


def _refused_by_the_system(error: OSError | sqlite3.OperationalError) -> UserError | None:
    """What the person can do something about; None when the error is a bug of ours."""
    noted = next(iter(getattr(error, "__notes__", ())), "")  # by those who know where it was, as errors often do not
    if isinstance(error, OSError):
        advice = system_advice(error)
        return UserError(f"{error.strerror}", where=error.filename or noted, fix=advice) if advice else None
    if is_damage(error):
        return None
    return UserError(f"{error}", where=noted or "a database of the store", fix="is its disk full, or not writable?")


UsageError: Any = typer.BadParameter.__base__
"""Of the click that typer brings along, or of click itself, by typer's version."""


def _misused(error: Any, as_json: bool) -> NoReturn:
    """A command line that cannot be understood, in the words of the library but on one line, then exit code 2."""
    command = error.ctx.command_path if error.ctx else "traceforge"
    said = " ".join(error.format_message().split()).rstrip(".")
    _complain(UserError(said[:1].lower() + said[1:], where=command, fix=f"{command} --help"), as_json)
    sys.exit(EXIT_BAD_INPUT)


class Commands(TyperGroup):
    """A command group whose errors are lines. What it does not expect is a bug, and stays a traceback."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.meta["json"] = "--json" in args
        is_bare = not args
        try:
            return super().parse_args(ctx, args)  # pyright: ignore[reportArgumentType]
        except UsageError as error:
            if is_bare:  # it shows the help
                raise
            _misused(error, ctx.meta["json"])

    def invoke(self, ctx: typer.Context) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        as_json = ctx.meta["json"]
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its import warns of a CPU kernel it lacks
        try:
            return super().invoke(ctx)  # pyright: ignore[reportArgumentType]
        except UsageError as error:
            _misused(error, as_json)
        except UserError as error:
            _complain(error, as_json)
            sys.exit(EXIT_BAD_INPUT)
        except (StageError, ArtifactError) as error:
            _complain(error, as_json)
            sys.exit(EXIT_FAILED)
        except (OSError, sqlite3.OperationalError) as error:
            refused = _refused_by_the_system(error)
            if refused is None:
                raise
            _complain(refused, as_json)
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            _complain(InterruptedError("interrupted; run the same command again to go on where it stopped"), as_json)
            sys.exit(EXIT_INTERRUPTED)
