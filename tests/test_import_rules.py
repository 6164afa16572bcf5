"""The layout's rules: flows compose, tasks adapt, functions do; and nothing works while it is imported."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import REPOSITORY

from tasks.stages import ALL_STAGES

PACKAGES = ("flows", "tasks", "schemas", "artifacts", "engine")
FILES = sorted([REPOSITORY / "traceforge.py", *(p for name in PACKAGES for p in (REPOSITORY / name).rglob("*.py"))])

TORCH = {"torch", "peft", "bitsandbytes", "accelerate", "unsloth"}
FORBIDDEN = {
    "engine": {"prefect", "tasks", "flows", "traceforge"},
    "schemas": {*TORCH, "transformers", "trl", "datasets", "prefect", "tasks", "flows", "artifacts", "engine"},
    "artifacts": {*TORCH, "tasks", "flows", "engine"},
    "tasks": {*TORCH, "prefect", "flows"},
    "flows": {*TORCH, "transformers", "trl", "datasets", "engine"},
    "traceforge.py": {*TORCH, "transformers", "prefect", "engine"},
}
PREFECT_IN_ARTIFACTS = {"artifacts/serializer.py", "artifacts/cache.py"}  # Prefect's own extension points

AT_IMPORT = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
)
"""What may stand at a module's top level, beside docstrings, `if TYPE_CHECKING`, `if __name__` and registrations."""


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_folder_imports_only_what_it_may() -> None:
    for file in FILES:
        relative = file.relative_to(REPOSITORY)
        tops = {name.split(".")[0] for name in imported(ast.parse(file.read_text()))}
        assert not tops & FORBIDDEN[relative.parts[0]], relative
        if relative.parts[0] == "artifacts" and relative.as_posix() not in PREFECT_IN_ARTIFACTS:
            assert "prefect" not in tops, relative


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")


def test_module_only_defines_things() -> None:
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            registers = isinstance(node, ast.Expr) and ast.unparse(node).startswith("app.add_typer(")
            defines = is_text or registers or _is_guard(node) or isinstance(node, AT_IMPORT)
            assert defines, f"{file}: {ast.unparse(node)}"


def test_environment_is_no_switch() -> None:
    """Nothing of ours is turned on or off by an environment variable; those of libraries are theirs."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("TRACEFORGE_") or node.value == "TRACEFORGE_ROOT", file


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(' '.join(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True, timeout=300
    )
    return {name for name in result.stdout.split() if "." not in name}


def test_command_line_starts_without_heavy_libraries() -> None:
    assert not modules_after("import traceforge") & {"torch", "transformers", "prefect", "pyarrow", "matplotlib"}


def test_schemas_load_without_torch() -> None:
    names = sorted(path.stem for path in (REPOSITORY / "schemas").glob("*.py") if path.stem != "__init__")
    assert not modules_after("; ".join(f"import schemas.{name}" for name in names)) & {"torch", "prefect"}


def test_flow_of_cached_stages_needs_neither_torch_nor_transformers() -> None:
    assert not modules_after("import flows.full, flows.local, tasks.stages") & {"torch", "transformers", "trl"}


def test_no_flow_file_is_named_like_a_package() -> None:
    names = {path.stem for path in (REPOSITORY / "flows").glob("*.py")}
    assert not names & {"datasets", "evaluate", "tasks", "artifacts", "schemas", "engine", "torch", "prefect"}


def test_versions_of_stages_are_those_of_their_modules() -> None:
    for stage in ALL_STAGES:
        assert stage.version() == importlib.import_module(stage.module).STAGE_VERSION


def test_versions_are_read_while_other_threads_parse_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11.7 loses count of an `ast.parse` that another thread's comes between; a run had failed of it."""

    def parse(*_: object, **__: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch (before=39, after=77)")

    monkeypatch.setattr(ast, "parse", parse)
    assert all(stage.version() > 0 for stage in ALL_STAGES)
