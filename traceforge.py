"""The command line. Every command is a thin call; what it imports, it imports when it runs."""

import atexit
from gc import freeze, set_threshold
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.console import Commands, console, emit, given_folder, only_config, stage_names, without_config
from schemas.requests import StageName

_OPTIONS: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
app = typer.Typer(cls=Commands, help="Turns the logged runs of a coding agent into a better model.", **_OPTIONS)
artifacts = typer.Typer(help="What the artifact store holds.", **_OPTIONS)
app.add_typer(artifacts, name="artifacts")

Config = Annotated[Path, typer.Argument(help="run configuration, a TOML file (see configs/)")]
TWO_GPU = Path("configs/qwen3-8b-2x24g.toml")
_HERE = Path(__file__).resolve().parent  # what only reads a configuration finds the project's own from anywhere
_OUT: dict[str, Any] = {"parser": given_folder, "metavar": "PATH"}
_MANY: dict[str, Any] = {"default_factory": list, "show_default": False}
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="overrides a key, in TOML", **_MANY)]
Refresh = Annotated[list[str], typer.Option(metavar="STAGE", help="runs a stage again, cached or not", **_MANY)]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout; logs stay on stderr")]
Verbose = Annotated[bool, typer.Option("--verbose", help="show Prefect's own log as well")]
StoreFolder = Annotated[Path, typer.Option("--store", help="folder of the artifact store")]


def _run(until: StageName, config: Path, overrides: list[str], refresh: list[str], json: bool, verbose: bool) -> None:
    from flows.local import run_inline
    from schemas.load import load_config

    loaded, again = load_config(config, overrides), stage_names(refresh)
    emit(run_inline(loaded, until=until, refresh=again, console=console, verbose=verbose), json)


@app.command()
def demo(
    tasks: Annotated[int, typer.Option(help="tasks to make sample runs of")] = 14,
    seed: Annotated[int, typer.Option(help="of the sample runs")] = 0,
    json: Json = False,
) -> None:
    """Shows everything. Reads configs/demo.toml; writes sample runs and the artifact store .traceforge."""
    from flows.demo import run_demo, where_to_look

    report = run_demo(n_tasks=tasks, seed=seed, console=console)
    emit(report, json, where_to_look(report))


@app.command()
def sample(
    out: Annotated[Path, typer.Option(**_OUT, help="folder for the runs: new, empty, or an earlier output")],
    tasks: Annotated[int, typer.Option(help="small Python packages with a bug to find")] = 16,
    seed: Annotated[int, typer.Option(help="equal seeds give equal bytes")] = 0,
    runs_per_task: Annotated[int, typer.Option(help="careful, sloppy and looping runs of each task")] = 4,
    tokens: Annotated[int, typer.Option(help="length of each run in tokens, 2000 to 100000")] = 2_000,
    json: Json = False,
) -> None:
    """Makes agent runs by really running scripted agents. Reads nothing; writes logs of mini-swe-agent 1.1 to --out."""
    from flows.demo import make_samples

    report = make_samples(out, tasks, seed, runs_per_task, tokens, console)
    emit(report, json, f"{report.n_runs} runs of {report.n_tasks} tasks: {report.out_dir}")


@app.command()
def run(config: Config, set_: Set, refresh: Refresh, json: Json = False, verbose: Verbose = False) -> None:
    """The whole pipeline. Reads source.paths of the configuration; writes every artifact into its store."""
    _run("promote", config, set_, refresh, json, verbose)


@app.command()
def ingest(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="logs (with --out), or one configuration")],
    set_: Set,
    refresh: Refresh,
    out: Annotated[
        Path | None, typer.Option(**_OUT, help="folder for trajectories.arrow, ingest.json and ingest.md")
    ] = None,
    format: Annotated[str, typer.Option(help="a log format's name; else found by content")] = "auto",
    no_redact: Annotated[bool, typer.Option("--no-redact", help="keep secrets and personal data")] = False,
    dedupe: Annotated[str, typer.Option(help="exact, near or off")] = "exact",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Log files to runs of one shape. Reads PATH..., or a TOML file's source.paths; writes --out, or its store."""
    if out is None:
        _run("ingest", only_config(paths), set_, refresh, json, verbose)
        return
    from flows.ingest_logs import ingest_logs

    without_config(("--set", set_), ("--refresh", refresh))
    report = ingest_logs(paths, out, source_format=format, redact=not no_redact, dedupe=dedupe)
    emit(report, json, report.text())


@app.command()
def render(config: Config, set_: Set, refresh: Refresh, json: Json = False, verbose: Verbose = False) -> None:
    """Runs to labelled tokens. Reads source.paths and the model's tokenizer; writes branches.arrow into the store."""
    _run("render", config, set_, refresh, json, verbose)


@app.command()
def pairs(config: Config, set_: Set, refresh: Refresh, json: Json = False, verbose: Verbose = False) -> None:
    """Labelled runs to preference pairs. Reads source.paths; writes pairs.arrow into the store."""
    _run("pairs", config, set_, refresh, json, verbose)


@app.command()
def sft(config: Config, set_: Set, refresh: Refresh, json: Json = False, verbose: Verbose = False) -> None:
    """Supervised fine-tuning. Reads source.paths and the model; writes a LoRA adapter into the store."""
    _run("sft", config, set_, refresh, json, verbose)


@app.command()
def simpo(
    config: Config,
    set_: Set,
    refresh: Refresh,
    plan: Annotated[str, typer.Option(help="auto, parallel, sequential or shared_prefix; else the config's")] = "",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Preference training on pairs. Reads source.paths and the model; writes a LoRA adapter into the store."""
    _run("simpo", config, [*set_, *([f"simpo.plan={plan}"] if plan else [])], refresh, json, verbose)


@app.command()
def evaluate(config: Config, set_: Set, refresh: Refresh, json: Json = False, verbose: Verbose = False) -> None:
    """Base, SFT and SimPO on held-out tasks. Reads source.paths and the model; writes a report, promotes nothing."""
    _run("evaluate", config, set_, refresh, json, verbose)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="a log file, or a trajectories, branches or pairs table")],
    set_: Set,
    branches: Annotated[list[Path], typer.Option(help="where a pair's branches are looked up", **_MANY)],
    config: Annotated[
        Path, typer.Option(help="whose model and render section to look with", show_default="configs/demo.toml")
    ] = _HERE / "configs" / "demo.toml",
    row: Annotated[int, typer.Option(help="which run, branch or pair of the file")] = 0,
    full: Annotated[bool, typer.Option("--full", help="fold nothing")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page here as well")] = None,
    json: Json = False,
) -> None:
    """A run as training sees it, its spans in colour and what is scored. Reads FILE; writes --html if given."""
    from flows.look import look, print_to_stdout
    from schemas.load import load_config

    report = look(file, load_config(config, set_), row=row, branches=branches, html=html)
    if json:
        emit(report, json)
    else:
        print_to_stdout(report, full=full)


@app.command()
def export(
    table: Annotated[Path, typer.Argument(help="a trajectories table (.arrow) of the store")],
    out: Annotated[Path, typer.Option(**_OUT, help="a JSON Lines file; for atif a folder")],
    format: Annotated[str, typer.Option(help="atif, openai or sharegpt")] = "openai",
    json: Json = False,
) -> None:
    """Runs in another tool's format; each can be ingested again. Reads TABLE; writes --out."""
    from flows.look import export_runs

    report = export_runs(table, out, format)
    emit(report, json, f"{report.n_runs} runs: {report.out}")


@app.command()
def plan(
    set_: Set,
    config: Annotated[
        Path, typer.Option(help="whose model, LoRA and optimiser sections count", show_default=str(TWO_GPU))
    ] = _HERE / TWO_GPU,
    model: Annotated[
        str | None, typer.Option(help="qwen3-8b, or a folder with config.json; else the configuration's")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="length of the branch")] = 81_920,
    scored: Annotated[
        int | None,
        typer.Option(min=1, help="how many of them are scored", show_default="4096, of fewer all that can be"),
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(help="memory of one GPU that may be used", show_default="model.gpu_gib, or 23.5")
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(help="host memory, of all GPUs", show_default="model.host_gib, or 64")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="how many GPUs share the pairs of a step")] = 1,
    shared: Annotated[int, typer.Option(min=0, help="tokens that both branches of a pair begin with")] = 0,
    json: Json = False,
) -> None:
    """Predicts memory, component by component, and who does what. Reads a model's config alone; writes nothing."""
    from schemas.errors import UserError
    from schemas.load import load_config
    from tasks.plan import plan_memory, plan_request

    if model is not None and not model:
        raise UserError("an empty name", where="--model", fix="give qwen3-8b, or a folder with config.json")
    loaded = load_config(config, set_)
    lengths = {"tokens": tokens, "scored": scored, "shared": shared}
    report = plan_memory(
        loaded, plan_request(loaded, **lengths, gpu_gib=gpu_gib, host_gib=host_gib, gpus=gpus), model or ""
    )
    emit(report, json, report.text())


@app.command()
def deploy(
    set_: Set,
    config: Annotated[Path, typer.Option(help="what the deployments run by default")] = TWO_GPU,
    notify: Annotated[str, typer.Option(help="TYPE/NAME of the Prefect block that bad nights are told through")] = "",
    json: Json = False,
) -> None:
    """Registers pools, deployments and automations. Reads deployments/; writes to the configured Prefect server."""
    from flows.deploy import deploy
    from schemas.load import load_config

    report = deploy(load_config(config, set_), notify=notify or None)
    emit(report, json, report.text())


@artifacts.command("list")
def list_(store: StoreFolder = Path(".traceforge"), json: Json = False) -> None:
    """Every payload and what refers to it. Reads the store; writes nothing."""
    from artifacts.gc import inventory
    from flows.display import payload_table

    found = inventory(store.absolute())
    emit(found, json, payload_table(found.payloads))


@artifacts.command()
def show(
    digest: Annotated[str, typer.Argument(help="the first digits of a payload's sha256")],
    store: StoreFolder = Path(".traceforge"),
    json: Json = False,
) -> None:
    """One payload in full. Reads the store; writes nothing."""
    from artifacts.gc import find

    found = find(store.absolute(), digest)
    emit(found, json, found.model_dump_json(indent=2))


@artifacts.command()
def verify(store: StoreFolder = Path(".traceforge"), json: Json = False) -> None:
    """Reads every payload and compares it with its digest. Writes nothing; exit code 1 when one was altered."""
    from artifacts.gc import check, require_sound
    from flows.display import payload_table

    found = check(store.absolute())
    emit(found, json, payload_table(found.payloads))
    require_sound(found)


@artifacts.command()
def gc(
    store: StoreFolder = Path(".traceforge"),
    keep_runs: Annotated[int, typer.Option(min=1, help="newest runs whose payloads are kept")] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    json: Json = False,
) -> None:
    """Removes what no alias and none of the newest runs refer to. Reads and writes the store."""
    from artifacts.gc import collect
    from flows.display import payload_table

    report = collect(store.absolute(), keep_runs=keep_runs, dry_run=dry_run)
    emit(report, json, payload_table(report.removed) if report.removed else "nothing to remove")


def main() -> None:
    set_threshold(50_000)  # what imports make lives to the end: looking through it for garbage takes a third longer,
    atexit.register(freeze)  # and most of that at the end
    app()
