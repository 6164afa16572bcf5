"""Running shell commands in a temporary repository, with output that is the same on every run.

The commands truly run. Only what would differ between two runs is rewritten in their output: paths of the
temporary folder and of the Python installation, patch versions, durations, object addresses.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import UserError

WORKDIR_SHOWN = "/testbed"
SHELL = "/bin/sh"
COMMAND_TIMEOUT_S = 60
SHOWN_ENV = {
    "COLUMNS": "80",
    "GIT_PAGER": "cat",
    "LC_ALL": "C.UTF-8",
    "PAGER": "cat",
    "PYTEST_ADDOPTS": "-p no:cacheprovider",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "TERM": "dumb",
    "TZ": "UTC",
}
_GIT_ENV = {
    "GIT_AUTHOR_DATE": "2025-01-01T00:00:00Z",
    "GIT_AUTHOR_EMAIL": "sample@example.invalid",
    "GIT_AUTHOR_NAME": "sample",
    "GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z",
    "GIT_COMMITTER_EMAIL": "sample@example.invalid",
    "GIT_COMMITTER_NAME": "sample",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}
_SUMMARY_WIDTH = 80
_BARE_DURATION = re.compile(r"\bin \d+\.\d+s(?: \(\d+:\d\d:\d\d\))?")
_RULED_DURATION = re.compile(r"^=+ (.*?) in \d+\.\d+s(?: \(\d+:\d\d:\d\d\))? =+$", re.MULTILINE)
_PYTEST_HEADER = re.compile(
    r"^(platform \S+ -- Python \d+\.\d+)\.[^,\s]+(, pytest-[^,\s]+), pluggy-[^,\s]+", re.MULTILINE
)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
# The patch of a machine without git: the same headers, made by the standard library.
_PATCH_SCRIPT = """
import difflib, sys
from pathlib import Path

old_root, wanted = Path(sys.argv[1]), sys.argv[2:]
names = sorted({p.relative_to(root).as_posix() for root in (old_root, Path()) for w in wanted
                for p in (root / w).rglob("*.py")})
for name in names:
    old, new = (p.read_text().splitlines(True) if p.exists() else [] for p in (old_root / name, Path(name)))
    if old != new:
        print(f"diff --git a/{name} b/{name}")
        sys.stdout.writelines(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))
"""


@dataclass(frozen=True)
class CommandResult:
    """`output` is stdout and stderr together, in the order written, after normalisation."""

    returncode: int
    output: str


@dataclass(frozen=True)
class Sandbox:
    """A repository at `workdir`, and what its commands need beside it: `bin/`, `home/`, `baseline/`."""

    root: Path
    git: str | None

    @property
    def workdir(self) -> Path:
        return self.root / "testbed"

    @property
    def patch_command(self) -> str:
        """The command that prints the changes below given folders; with git absent, a script of ours."""
        return "git diff --" if self.git else "make-patch"


def find_git() -> str | None:
    """The path of git, or None: then patches are made with difflib."""
    return shutil.which("git")


def open_sandbox(root: Path, files: Mapping[str, str], *, git: str | None) -> Sandbox:
    """Make a sandbox in the new folder `root` and put `files` (relative path to text) under version control."""
    sandbox = Sandbox(root, git)
    (root / "bin").mkdir(parents=True)
    (root / "home").mkdir()
    write_files(sandbox.workdir, files)
    # A wrapper and not a link: a link outside its virtual environment would lose the environment's packages.
    _write_script(root / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"\n')
    if git:
        _write_script(root / "bin" / "git", f'exec {shlex.quote(git)} "$@"\n')
        for arguments in (
            "-c init.defaultBranch=main init -q --template=",
            "-c core.autocrlf=false add -A",
            "commit -q -m 'Initial state'",
        ):
            result = run_command(sandbox, f"git {arguments}")
            if result.returncode != 0:
                raise UserError(f"git failed: {result.output.strip()}", where=git, fix="repair or remove this git")
    else:
        write_files(root / "baseline", files)
        (root / "make_patch.py").write_text(_PATCH_SCRIPT)
        script, baseline = shlex.quote(str(root / "make_patch.py")), shlex.quote(str(root / "baseline"))
        _write_script(root / "bin" / "make-patch", f'exec python {script} {baseline} "$@"\n')
    return sandbox


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write every text at its relative path below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def run_command(sandbox: Sandbox, command: str) -> CommandResult:
    """Run one shell command in the repository. The caller's environment is not passed on.

    Raises UserError when it takes over COMMAND_TIMEOUT_S: a cut-off command would not be reproducible.
    """
    process = subprocess.Popen(
        [SHELL, "-c", command],
        cwd=sandbox.workdir,
        env=_environment(sandbox),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        raw, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"a command of a sample run took over {COMMAND_TIMEOUT_S} s",
            where=command,
            fix="use fewer jobs on this machine",
        ) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return CommandResult(process.returncode, normalise(raw.decode("utf-8", "replace"), sandbox))


def normalise(output: str, sandbox: Sandbox) -> str:
    """Rewrite what differs between two runs of the same command: paths, durations, versions, addresses."""
    for path, shown in _shown_paths(sandbox):
        output = output.replace(path, shown)
    output = _RULED_DURATION.sub(lambda found: f" {found[1]} in 0.05s ".center(_SUMMARY_WIDTH, "="), output)
    output = _BARE_DURATION.sub("in 0.05s", output)
    output = _PYTEST_HEADER.sub(r"\1\2", output)
    return _ADDRESS.sub("at 0x7f0000000000", output)


def _shown_paths(sandbox: Sandbox) -> list[tuple[str, str]]:
    """Real paths and what is shown in their place, longest first, so that no prefix is replaced too early."""
    python = f"/usr/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    shown = {
        str(sandbox.workdir): WORKDIR_SHOWN,
        str(sandbox.workdir.resolve()): WORKDIR_SHOWN,
        str(sandbox.root): "/sandbox",
        str(sandbox.root.resolve()): "/sandbox",
        sysconfig.get_path("stdlib"): python,
        sysconfig.get_path("purelib"): f"{python}/site-packages",
        sys.executable: "/usr/bin/python",
    }
    return sorted(shown.items(), key=lambda pair: len(pair[0]), reverse=True)


def _environment(sandbox: Sandbox) -> dict[str, str]:
    path = os.pathsep.join((str(sandbox.root / "bin"), str(Path(sys.executable).parent), os.defpath))
    home = str(sandbox.root / "home")
    return {**SHOWN_ENV, **_GIT_ENV, "HOME": home, "TMPDIR": home, "PATH": path}


def _write_script(path: Path, body: str) -> None:
    path.write_text(f"#!{SHELL}\n{body}")
    path.chmod(0o755)
