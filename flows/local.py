"""Runs the pipeline in this process: with the Prefect server that is configured, else with a private one."""

import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from artifacts.store import Store
from flows.display import Display, final_table
from schemas.config import RunConfig
from schemas.errors import StageError
from schemas.requests import StageName
from schemas.runs import RunReport
from tasks.input_files import find_files
from tasks.local_server import start_unless_configured
from tasks.progress import observed_by


def run_inline(
    config: RunConfig,
    *,
    until: StageName = "promote",
    refresh: Sequence[StageName] = (),
    console: Console,
    verbose: bool = False,
) -> RunReport:
    """Runs the pipeline up to a stage and shows it on the console.

    Raises:
        UserError: the configuration, its source or the Prefect server that is configured cannot be used.
        StageError: the Prefect API failed on the way.
        Exception: what a stage raised.
    """
    for _ in find_files(config.source.paths):  # a path that is not there is told before anything starts
        pass
    store = Store(config.store).root
    if not verbose:  # the display says it all; the API still gets every line
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    server = start_unless_configured(store / "prefect")
    import httpx  # all of these while the server boots
    from prefect.settings import (
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )

    from flows.full import traceforge

    settings: dict[Any, Any] = {
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None
    }  # nobody watches an inline run; each costs a second
    if server is not None:
        server.wait_until_healthy()
        settings[PREFECT_LOGGING_TO_API_ENABLED] = False
    try:
        with temporary_settings(settings), Display(console) as display, observed_by(display):
            report = traceforge(config, until=until, refresh=tuple(refresh))
    except httpx.HTTPError as error:
        log = f"; see {server.log}" if server else ""
        raise StageError(
            f"the Prefect API failed: {type(error).__name__}: {str(error).splitlines()[0]}{log}"
        ) from error
    assert isinstance(report, RunReport)  # a state is what a cancel on the pool ends with
    console.print(final_table(report), soft_wrap=True)
    return report
