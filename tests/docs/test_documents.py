"""What README and docs tell people to run, runs; what they link to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- (file|run)(?:: ([^ ]+))? -->\n```(\w+)\n(.*?)```", re.DOTALL)
WITH_BLOCKS = [path for path in DOCUMENTS if BLOCK.search(path.read_text(encoding="utf-8"))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", WITH_BLOCKS, ids=lambda path: path.name)
def test_blocks_marked_to_run_run(document: Path, tmp_path: Path) -> None:
    """A block is written to the file that its mark names, or run (`run: 2`: and ends with that code)."""
    for name in ("experiments", "schedulers", "research_engine"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["OMP_NUM_THREADS"] = "1"  # the models are tiny; threads would only wait for one another
    for kind, argument, language, text in BLOCK.findall(document.read_text(encoding="utf-8")):
        if kind == "file":
            (tmp_path / argument).write_text(text, encoding="utf-8")
            continue
        command = ["bash", "-e", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == int(argument or 0), f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if target and not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_a_section_lead_to_one(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s#:]*\.md)?#([^)\s]+)\)", document.read_text(encoding="utf-8"))
    pages = {name: (document.parent / name if name else document).read_text(encoding="utf-8") for name, _ in links}
    titles = {name: re.findall(r"^#+ (.*)$", text, re.MULTILINE) for name, text in pages.items()}
    anchors = {
        name: {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in found} for name, found in titles.items()
    }
    assert [(name, anchor) for name, anchor in links if anchor not in anchors[name]] == []


def test_the_policy_of_the_readme_has_about_30_lines() -> None:
    (block,) = [text for kind, _, _, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "file"]
    assert len(block.splitlines()) <= 30


@pytest.mark.parametrize("readme", DOCUMENTS[:2], ids=lambda path: path.name)
def test_a_readme_links_to_every_page(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    assert [page.name for page in DOCUMENTS[2:] if f"](docs/{page.name})" not in text] == []


def test_both_readmes_give_the_same_commands() -> None:
    commands = [
        re.findall(r"^pip install .*$", path.read_text(encoding="utf-8"), re.MULTILINE) for path in DOCUMENTS[:2]
    ]
    assert commands[0] == commands[1]
    assert len(commands[0]) == 2
