"""Inspecting a run, a branch and a pair: the report, the terminal and the page."""

import gzip
import json
import re
import shutil
from io import StringIO
from pathlib import Path

import pytest
from render_inputs import result, stored, system, trajectory, turn, user
from rich.console import Console

from artifacts.store import Store
from schemas.config import PairsConfig, RenderConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.trajectory import Outcome, OutcomeStatus
from tasks.inspect import inspect_file
from tasks.inspect_view import html_page, print_inspection
from tasks.pairs import build_pairs
from tasks.render import render

pytest_plugins = ("render_fixtures",)

NASTY = "<script>alert(1)</script> \x1b[2J & more"


@pytest.fixture(scope="module")
def files(store: Store, model: Ref) -> dict[str, Path]:
    statuses: tuple[tuple[str, OutcomeStatus], ...] = (("good", "resolved"), ("bad", "failed"))
    runs = [
        trajectory(
            system(),
            user(),
            turn("I look.", ("bash", "{}")),
            result(NASTY + "\nline" * 40),
            turn(name),
            trajectory_id=name,
            outcome=Outcome(status=status, source="reward"),
        )
        for name, status in statuses
    ]
    table = stored(runs, store)
    branches = render(table, model, RenderConfig(), SplitConfig(heldout_share=0), store).branches
    pairs = build_pairs(branches, table, PairsConfig(), store).pairs
    return {"trajectories": Path(table.path), "branches": Path(branches.path), "pairs": Path(pairs.path)}


def printed(report: object, *, full: bool = False) -> str:
    console = Console(file=StringIO(), width=160, force_terminal=True, color_system="standard")
    print_inspection(report, console, full=full)  # pyright: ignore[reportArgumentType]
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_is_shown_the_same_from_a_trajectory_and_a_branch(files: dict[str, Path], model: Ref) -> None:
    run, branch = (
        inspect_file(files[name], model, RenderConfig(), row=1).branch for name in ("trajectories", "branches")
    )
    assert run is not None
    assert branch is not None
    assert run.segments == branch.segments
    assert run.n_tokens == sum(run.tokens_by_kind.values()) == sum(segment.n_tokens for segment in run.segments)
    assert run.n_scored == sum(run.scored_by_kind.values()) > 0
    assert set(run.scored_by_kind) == {"action", "turn_end"}
    assert "".join(segment.text for segment in run.segments).endswith("bad<|im_end|>\n")


def test_the_terminal_marks_what_is_scored_and_obeys_no_log(files: dict[str, Path], model: Ref) -> None:
    report = inspect_file(files["trajectories"], model, RenderConfig())
    text = printed(report)
    assert "\x1b[1;7;32m<tool_call>" in text  # an action, scored: bold, reverse, green
    assert "\x1b[33mI look." in text  # a thought, not scored: yellow alone
    assert "\x1b[2J" not in text  # the log's own control sequence is shown, not sent
    assert re.search(r"… \d+ lines …", text)
    assert "lines …" not in printed(report, full=True)


def test_a_pair_folds_what_both_sides_share(files: dict[str, Path], model: Ref) -> None:
    report = inspect_file(files["pairs"], model, RenderConfig(), branches=[files["branches"]])
    assert report.pair is not None
    pair = report.pair
    assert sum(segment.n_tokens for segment in pair.shared_prefix) == pair.n_shared_prefix
    for side, word in ((pair.chosen, "good"), (pair.rejected, "bad")):
        assert [segment.text for segment in side.segments] == [word, "<|im_end|>", "\n"]
        assert side.n_tokens == pair.n_shared_prefix + sum(segment.n_tokens for segment in side.segments)
    text = printed(report)
    assert f"shared prefix: {pair.n_shared_prefix} tokens" in text
    assert "I look." not in text


def test_a_pairs_branches_are_found_in_its_store(files: dict[str, Path], model: Ref, store: Store) -> None:
    given = inspect_file(files["pairs"], model, RenderConfig(), branches=[files["branches"]])
    # the same runs rendered otherwise have the same branch ids, and are newer; a table of another version is there too
    other = RenderConfig(loss_on=("turn_end",))
    with store.staging() as folder:
        copied = shutil.copy(files["trajectories"], folder / "trajectories.arrow")
        table = store.add(Path(copied), "trajectories", n_rows=2)
    assert Path(render(table, model, other, SplitConfig(heldout_share=0), store).branches.path) != files["branches"]
    (store.root / "branches" / "old").mkdir(exist_ok=True)
    (store.root / "branches" / "old" / "branches.arrow").write_text("old")
    assert inspect_file(files["pairs"], model, RenderConfig()) == given


def test_the_page_stands_alone_and_escapes(files: dict[str, Path], model: Ref) -> None:
    for name in ("trajectories", "pairs"):
        page = html_page(inspect_file(files[name], model, RenderConfig(), branches=[files["branches"]]))
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert not re.search(r"(src|href)=|@import|url\(", page)
        assert 'class="action scored"' in page


def test_a_log_file_of_a_real_run(shared_dir: Path, model: Ref) -> None:
    path = shared_dir / "openai-chat-tau-bench" / "airline_task21_trial0.json"
    report = inspect_file(path, model, RenderConfig())
    assert report.branch is not None
    assert report.branch.n_turns_scored == 14
    assert json.loads(report.model_dump_json())["branch"]["n_scored"] == report.branch.n_scored


def test_a_packed_log_is_looked_at_as_ingestion_reads_it(tmp_path: Path, model: Ref) -> None:
    token = "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx"
    lines = [json.dumps({"messages": [{"role": "user", "content": f"{name} {token}"},
                                      {"role": "assistant", "content": "ok"}]}) for name in "ab"]  # fmt: skip
    path = tmp_path / "runs.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    shown = inspect_file(path, model, RenderConfig(), row=1)
    assert shown.n_rows == 2
    assert "b [github_token-1]" in printed(shown)
    assert token in printed(inspect_file(path, model, RenderConfig(), row=1, redact=False))
    with pytest.raises(UserError, match="rows 0 to 1"):
        inspect_file(path, model, RenderConfig(), row=2)


def test_a_log_without_an_outcome_says_who_reads_the_files_beside_it(shared_dir: Path, model: Ref) -> None:
    path = next((shared_dir / "mini-swe-agent").rglob("*.traj.json"))
    report = inspect_file(path, model, RenderConfig())
    assert report.branch is not None
    assert report.branch.outcome == "unknown"
    assert "read by `traceforge ingest` only" in printed(report)


def test_a_run_that_would_be_dropped_says_so(files: dict[str, Path], model: Ref) -> None:
    report = inspect_file(files["trajectories"], model, RenderConfig(max_tokens=50))
    assert "more than max_tokens = 50" in printed(report)


def test_bad_input_is_one_line(files: dict[str, Path], model: Ref, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere" / "pairs" / "0" / "pairs.arrow"
    alone.parent.mkdir(parents=True)
    alone.write_bytes(files["pairs"].read_bytes())
    (tmp_path / "no.json").write_text("[1, 2")
    (tmp_path / "no.arrow").write_text("nothing")
    for path, row, message in (
        (tmp_path / "none.json", 0, "no such file"),
        (tmp_path / "no.json", 0, "no.json"),
        (tmp_path / "no.arrow", 0, "not a whole Arrow stream"),
        (files["branches"], 7, "no row 7"),
        (alone, 0, "no branch"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            inspect_file(path, model, RenderConfig(), row=row)
        assert "\n" not in str(raised.value)
