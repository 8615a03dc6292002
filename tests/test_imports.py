"""The import rule: layers point only leftwards, and Ray stays in `actors` and `lanes/object_store.py`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "raymoe"
LAYERS = [
    "errors",
    "v1",
    # So far left that it can import nothing heavy: programs that only ask a server need no more.
    "client",
    "config",
    "observe",
    "policy",
    "checkpoint",
    "model",
    "lanes",
    "experts",
    "dispatch",
    "engine",
    "api",
    "actors",
    "commands",
    "cli",
]
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(path, source):
    """What a file of this path imports and may not."""
    layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
    found = []
    for name in imported(ast.parse(source)):
        top, _, rest = name.partition(".")
        if top == "raymoe" and rest and rest.split(".")[0] in LAYERS:
            if LAYERS.index(rest.split(".")[0]) > LAYERS.index(layer):
                found.append(name)
        elif top == "ray" and layer != "actors" and path != ROOT / "lanes" / "object_store.py":
            found.append(name)
    return found


def test_the_layers_are_the_packages_there_are():
    names = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert names == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_leftwards_and_ray_stays_in_its_place(path):
    assert breaches(path, path.read_text(encoding="utf-8")) == []


def test_the_rule_notices_a_breach():
    assert breaches(ROOT / "lanes" / "x.py", "import ray\nfrom raymoe.engine import loop") != []
    assert breaches(ROOT / "policy" / "x.py", "def f():\n    from raymoe.lanes import shm") != []
    assert breaches(ROOT / "actors" / "x.py", "import ray\nfrom raymoe.engine import loop") == []


def test_the_data_plane_does_not_load_ray():
    import subprocess
    import sys

    code = "import sys, raymoe.dispatch.dispatcher, raymoe.experts.serve; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
