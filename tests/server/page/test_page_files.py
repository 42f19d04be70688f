"""The page's files: all served, with headers that let them load and run nothing but themselves, and all installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from research_engine.server.page import page_files, page_router

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


@pytest.mark.parametrize("url", page_files())
def test_every_file_has_its_type_and_a_policy_that_trusts_this_server_alone(url, client):
    answer = client.get(url)
    assert answer.status_code == 200 and answer.text == page_files()[url].read_text(encoding="utf-8")
    kinds = {"": "text/html", ".css": "text/css", ".js": "text/javascript"}
    assert answer.headers["content-type"] == f"{kinds[Path(url).suffix]}; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy and "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_did_not_change_is_not_sent_again(client):
    tag = client.get("/").headers["etag"]
    again = client.get("/", headers={"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b""
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_head_and_other_methods_and_files(client):
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 405
    assert client.get("/page/__init__.py").status_code == 404


def test_the_page_has_no_inline_code_and_names_only_files_that_are_served():
    html = page_files()["/"].read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", html)
    named = re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', html)
    named += [f"page/{name}" for path in page_files().values()
              for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8"))]  # fmt: skip
    assert {f"/{name}" for name in named} == set(page_files()) - {"/"}


def test_no_script_makes_markup_of_text():
    scripts = "".join(path.read_text(encoding="utf-8") for path in page_files().values() if path.suffix == ".js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", scripts)
    assert "http://" not in scripts and "https://" not in scripts


def test_installing_takes_the_files_along():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.search(r"\[tool.setuptools.package-data\]\n((?:.+\n)+)", settings)
    assert patterns is not None
    assert all(f"*{path.suffix}" in patterns[1] for path in page_files().values())
