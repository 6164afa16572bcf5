"""Shell commands the policies use: editing a file, driving pdb, and reading what came back."""

import random
import re
import shlex
from collections.abc import Sequence

from tasks.sample.bugs import Edit, SampleTask, line_of

REPRO_FILE = "repro.py"
_PROMPT = "(Pdb) "


def edit_command(rng: random.Random, path: str, source: str, edit: Edit) -> str:
    """A command that makes `edit` in the file `path`, whose text is `source`, in one of four styles.

    sed serves edits within one line; the other styles serve any.
    """
    old, new = edit
    styles = ["script", "rewrite"]
    if "\n" not in old + new and "'" not in old + new:
        styles += ["sed_pattern", "sed_line"] * 2
    style = rng.choice(styles)
    if style == "sed_pattern":
        return f"sed -i 's|{_sed_pattern(old)}|{_sed_replacement(new)}|' {path}"
    if style == "sed_line":
        return f"sed -i '{line_of(source, old)}s|{_sed_pattern(old)}|{_sed_replacement(new)}|' {path}"
    if style == "rewrite":
        return rewrite_command(path, source.replace(old, new))
    return (
        "python - <<'EOF'\n"
        "from pathlib import Path\n\n"
        f"path = Path({path!r})\n"
        "text = path.read_text()\n"
        f"old = {old!r}\n"
        "assert text.count(old) == 1\n"
        f"path.write_text(text.replace(old, {new!r}))\n"
        "EOF"
    )


def rewrite_command(path: str, text: str) -> str:
    """Write a whole file."""
    return f"cat > {path} <<'EOF'\n{text}EOF"


def missed_edit_command(path: str, source: str, edit: Edit) -> str:
    """A sed command on the line below the right one: it succeeds and changes nothing."""
    old, new = (text.splitlines()[0] for text in edit)
    program = f"{line_of(source, old) + 1}s|{_sed_pattern(old)}|{_sed_replacement(new)}|"
    return f"sed -i {shlex.quote(program)} {path}"


def tamper_command(task: SampleTask) -> str:
    """Turn the failing test's assertion into one that always holds."""
    test = task.bug.failing_test
    return f"sed -i '/def {test}/,/assert/ s/assert .*/assert True/' {task.test_path}"


def pdb_command(task: SampleTask) -> str:
    """Write the reproduction script and run it under pdb, stopped where the bug shows."""
    lines = [f"b {task.module_path}:{task.stop_line}", *["c"] * task.bug.n_stops]
    lines += [f"p {expression}" for expression in task.bug.watch]
    commands = "\n".join([*lines, "q"])
    return f"cat > {REPRO_FILE} <<'EOF'\n{task.bug.repro}EOF\npython -m pdb {REPRO_FILE} <<'EOF'\n{commands}\nEOF"


def pdb_values(task: SampleTask, output: str) -> list[str]:
    """What pdb printed for each watched expression, in order; fewer when the session ended early."""
    answers = output.split(_PROMPT)[2 + task.bug.n_stops :]
    return [answer.strip() for answer in answers[: len(task.bug.watch)]]


def failure_line(output: str) -> str:
    """The first line in which pytest says what was wrong, or an empty string."""
    found = re.search(r"^E +(.+)$", output, re.MULTILINE)
    return found[1] if found else ""


def pp_command(package: str, start: int, stop: int) -> str:
    """Pretty-print a range of records from inside pdb."""
    return (
        f"cat > scan.py <<'EOF'\nfrom {package}.records import load_rows\n\nrows = load_rows()\nprint(len(rows))\n"
        f"EOF\npython -m pdb scan.py <<'EOF'\nb scan.py:4\nc\npp rows[{start}:{stop}]\nq\nEOF"
    )


def failing_check_command(task: SampleTask, n_rows: int) -> str:
    """Write check.py, which prints records and then fails on the bug, and run it."""
    body = (
        f"from {task.domain.package}.records import load_rows\n\nfor row in load_rows(0, {n_rows}):\n    print(row)\n"
    )
    return f"cat > check.py <<'EOF'\n{body if n_rows else ''}{task.bug.repro}EOF\npython check.py"


def lines_within(lines: Sequence[str], start: int, n_chars: int) -> int:
    """The index behind the last of `lines` from `start` that fits into `n_chars`; at least one line."""
    used, stop = 0, start
    while stop < len(lines) and (stop == start or used + len(lines[stop]) <= n_chars):
        used += len(lines[stop])
        stop += 1
    return stop


def _sed_pattern(text: str) -> str:
    return re.sub(r"([\\.\[\]*^$|])", r"\\\1", text)


def _sed_replacement(text: str) -> str:
    return re.sub(r"([\\&|])", r"\\\1", text)
