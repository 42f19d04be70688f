"""The page at `/`: chat, live metrics and the batch timeline, as plain files that need no build step and no network."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

# The page loads its own files and talks to its own server; nothing that a model writes can load or run anything.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked after each time: another version is seen at once
}


def page_files() -> dict[str, Path]:
    """Path in the URL -> file."""
    files = {f"/page/{path.name}": path for path in sorted(_FOLDER.iterdir()) if path.suffix in (".css", ".js")}
    return {"/": _FOLDER / "index.html", **files}


def page_router() -> APIRouter:
    """Routes of the page and its files. They hold no secret: the key is typed into the page and sent by it."""
    router = APIRouter()
    for url, path in page_files().items():
        _add(router, url, path)
    return router


def _add(router: APIRouter, url: str, path: Path) -> None:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=f"{_TYPES[path.suffix]}; charset=utf-8")

    router.add_api_route(url, serve, methods=["GET", "HEAD"], include_in_schema=False)
