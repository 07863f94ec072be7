"""Imports point down the layers only: pallas_kernels <- models <- pagedjax <- scripts, tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["pallas_kernels", "pagedjax.models", "pagedjax", "scripts", "tests"]
FOLDERS = dict(zip(["pallas_kernels", "models", "pagedjax", "scripts"], LAYERS, strict=False))
DEVICE_FREE = [
    *("block_pool", "block_hash", "kv_cache_manager", "scheduler", "plan", "waiting_queue"),
    *("preemption", "request", "beam_search", "sampling_params", "options", "errors", "outputs"),
    "checked",
]


def layer_of(module: str) -> int | None:
    """The most specific layer that holds a module; None for other packages."""
    for name in sorted(LAYERS, key=len, reverse=True):
        if module == name or module.startswith(name + "."):
            return LAYERS.index(name)
    return None


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down(folder):
    own = LAYERS.index(FOLDERS[folder])
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for module in imports_of(path):
            layer = layer_of(module)
            assert layer is None or layer <= own, f"{path.relative_to(ROOT)} imports {module}"


def test_an_upward_import_would_be_seen():
    assert layer_of("pagedjax.engine") == LAYERS.index("pagedjax")
    assert layer_of("pagedjax.models.decoder") == LAYERS.index("pagedjax.models")
    assert layer_of("pallas_kernels.blocks") == 0
    assert layer_of("numpy") is None


@pytest.mark.parametrize("module", DEVICE_FREE)
def test_scheduling_needs_no_device_arrays(module):
    imports = imports_of(ROOT / "pagedjax" / f"{module}.py")
    assert not [name for name in imports if name.split(".")[0] in ("jax", "flax")]


def test_files_stay_readable():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            lines = path.read_text().count("\n")
            assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines; split it"
