"""What README.md and docs/ say about the code is what the code says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from bench import dispatch
from bench.__main__ import BENCHMARKS
from raymoe.cli import app
from raymoe.config import Settings
from tests.test_imports import LAYERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# In brackets, so that this file does not match itself.
OF_ONE_MACHINE = re.compile(r"/(?:work|root|home|opt)/|index[-]url|find[-]links")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def first_column(text: str) -> list[str]:
    """What stands in backticks in the first column of all tables, in order."""
    return [
        name for row in re.findall(r"^\| (`[^|]*) \|", text, re.M) for name in re.findall(r"`([^`]+)`", row)
    ]


def tracked() -> list[Path]:
    """The repository's files; without git, or in an archive, there is no telling which they are."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"git does not list this folder's files: {done.stderr.strip()}")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def slugs(markdown: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", markdown, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(source: Path) -> list[str]:
    """Links of a page to files or headings that are not there. Links to other sites are not followed."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", source.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (source.parent / name) if name else source
        if not file.exists() or (anchor and anchor not in slugs(file.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def test_every_module_and_package_has_its_line_in_the_life_of_a_request() -> None:
    text = page("docs/request.md")
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "raymoe").rglob("*.py")]
    modules = [name for name in files if not name.endswith("__init__.py")]
    assert sorted(first_column(text)) == sorted(modules)
    packages = [
        name.removesuffix("/__init__.py") for name in files if name.count("/") == 2 and "__init__" in name
    ]
    assert sorted(re.findall(r"^### `(raymoe/\w+)`", text, re.M)) == sorted(packages)


def test_every_setting_and_its_default_are_in_the_settings_page() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `([^`]*)` \| ", page("docs/settings.md"), re.M)
    written = [(name, yaml.safe_load(default)) for name, default in rows]
    settings = Settings().model_dump()
    assert written == [(f"{s}.{k}", value) for s, section in settings.items() for k, value in section.items()]


def test_the_serve_file_holds_settings() -> None:
    for application in yaml.safe_load(page("deployments/local.yaml"))["applications"]:
        Settings.build(application["args"])


def test_the_readmes_commands_are_those_of_the_command_line() -> None:
    commands = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    commands += [group.name for group in app.registered_groups if group.name]
    assert sorted(name.split()[1] for name in first_column(page("README.md"))) == sorted(commands)


def test_scripts_layers_and_benchmarks_are_described() -> None:
    text = page("docs/contributing.md")
    names = first_column(text)
    scripts = [f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir()]
    assert sorted(name for name in names if name.startswith("scripts/")) == sorted(scripts)
    assert f"`{', '.join(LAYERS)}`" in text
    assert {*dispatch.CASES, *dispatch.RATIOS, "ms", "ratios", "control"} <= set(names)
    assert all(f"`python -m bench {name}`" in text for name in BENCHMARKS)


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.name)
def test_links_between_files_resolve(source: Path) -> None:
    assert broken_links(source) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One two\n[x](a.md#one-two) [y](b.md) [z](#three)\n")
    assert broken_links(tmp_path / "a.md") == ["b.md", "#three"]


def test_nothing_names_the_machine_it_was_written_on() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in OF_ONE_MACHINE.finditer(text)]
    assert found == []
    assert OF_ONE_MACHINE.search("cd /" + "root/x") and OF_ONE_MACHINE.search("--extra-index" + "-url")


def test_packages_come_from_whatever_index_pip_is_set_to() -> None:
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup", ".ci/run"):
        assert "://" not in page(name), f"{name} names a host"
