"""The structure's promises: imports point one way, and outside the container nothing imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT

PACKAGE = PROJECT / "pipeline"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "numpy", "sentencepiece", "datasets", "pyarrow", "plotly", "safetensors", "transformers"}
CONTROL = [path for path in MODULES if path.parent.name not in ("lm", "stages")]

# What a module of pipeline/lm may use of the rest: the Config, its arithmetic, and leaves that know no Run.
LM_MAY_IMPORT = {
    "pipeline.config.schema",
    "pipeline.errors",
    "pipeline.files",
    "pipeline.inference.hugging_face",
    "pipeline.evaluation.questions",
    "pipeline.signals",
    "pipeline.plan.sizes",
    "pipeline.run.steps",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """List the modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.iter_child_nodes(tree) if top_level else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = PROJECT.joinpath(*node.module.split("."))
            inside = {alias.name for alias in node.names if (folder / f"{alias.name}.py").is_file()}
            found |= {f"{node.module}.{name}" for name in inside} or {node.module}
    return found


@pytest.mark.parametrize("path", CONTROL, ids=name_of)
def test_control_half_imports_nothing_heavy(path: Path) -> None:
    used = {module.split(".")[0] for module in imports(path)}
    allowed = (
        {"plotly"} if path == PACKAGE / "report" / "charts.py" else set()
    )  # an extra, imported when charts are drawn
    assert used & HEAVY <= allowed
    assert not {module.split(".")[0] for module in imports(path, top_level=True)} & HEAVY


@pytest.mark.parametrize("path", sorted((PACKAGE / "lm").glob("*.py")), ids=name_of)
def test_lm_knows_only_the_config(path: Path) -> None:
    outside = {m for m in imports(path) if m.startswith("pipeline") and not m.startswith("pipeline.lm")}
    sections = {name_of(path) for path in (PACKAGE / "config").glob("*.py")}
    assert outside - {"pipeline"} <= LM_MAY_IMPORT | sections


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_imports_mains_or_cli(path: Path) -> None:
    used = imports(path)
    if path.parent.name != "stages":
        assert not any(module.startswith("pipeline.stages") for module in used)
    if path.name != "__main__.py":
        assert "pipeline.cli.verbs" not in used


def test_the_command_line_starts_without_torch(micro: Path) -> None:
    code = "import sys; from pipeline.submit import ask; ask.request([sys.argv[1]], 'local', None); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, str(micro)], capture_output=True, text=True, cwd=PROJECT, check=True
    )
    assert not set(result.stdout.split()) & HEAVY


def test_a_plan_loads_nothing_that_only_a_submission_needs(micro: Path) -> None:
    words = ["plan", str(micro), "--cluster", "local"]
    code = f"import sys; sys.argv[1:] = {words}; import atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); import pipeline.__main__"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)
    loaded = set(result.stderr.split())
    assert "pipeline.submit.ask" in loaded
    assert not loaded & {
        "pipeline.submit.local",
        "pipeline.submit.to_slurm",
        "pipeline.status.read",
        "tarfile",
        "rich._emoji_codes",
    }


def test_no_word_of_a_shell_is_given_to_the_container() -> None:
    for path in [*(PACKAGE / "lm").glob("*.py"), *(PACKAGE / "stages").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.name != "native.py":  # calls the C compiler, where there is one
            assert "subprocess" not in text, f"{path} starts a process: Slurm's commands are not in the image"


def test_one_module_calls_slurms_commands() -> None:
    """`sbatch` and `srun` are also words of a Plan; the others would only be written to be run."""
    commands = {"squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr", "sprio", "sshare"}
    for path in CONTROL:
        lists = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.List)]
        first = {node.elts[0].value for node in lists if node.elts and isinstance(node.elts[0], ast.Constant)}
        assert not first & commands or path == PACKAGE / "slurm" / "commands.py", (
            f"{path.name} calls {first & commands}"
        )
