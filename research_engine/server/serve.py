"""`research-engine serve`: starts the engine process and the HTTP server, and brings both to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import gc
import importlib.metadata
import ipaddress
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import yaml

from research_engine import __version__
from research_engine.server.app import Access, ServerApp
from research_engine.server.context import ServerContext
from research_engine.server.engine_client import EngineClient, EngineDeadError, EngineStartError, RefusedError
from research_engine.server.engine_source import EngineSource
from research_engine.server.limits import BoundedProtocol
from research_engine.server.serve_options import ServeOptions, ServerOptions, parse
from research_engine.server.wire import Ready

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer

log = logging.getLogger("research_engine.server")
_LAST_SECONDS = 1.0  # for the last answers after the engine's death or the end of a drain, before connections are cut
_SEND_BYTES = 262144  # that the kernel holds for a client that does not read; left alone, it would take megabytes
_PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "msgspec", "llguidance")


def main(args: Sequence[str]) -> int:
    """The command. Returns the exit code: 0 after an orderly end, 1 when the engine died, 2 for a user's mistake."""
    options = parse(args)
    return run(options, EngineSource(options.engine))


def run(options: ServeOptions, source: EngineSource) -> int:
    """Serve until told to end.

    Raises:
        ValueError: an option, the model's name or a scheduler's parameter is wrong.
    """
    _open_closed_streams()
    logging.basicConfig(
        level=options.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    serving = Serving(options, source)
    try:
        import uvloop
    except ImportError:  # not on every platform
        code = asyncio.run(serving.run())
    else:
        code = uvloop.run(serving.run())
    if serving.leaves_engine:  # Python's own way out would wait for it
        logging.shutdown()
        os._exit(code)
    return code


def _open_closed_streams() -> None:
    """Open what was closed at the start as /dev/null, for the engine process too: no socket may get these numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


class _HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process by the signal."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    def cut_all(self) -> None:
        """Close every connection at once, whatever is still to be sent."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """One run of the server.

    Attributes:
        leaves_engine: an engine process could not be ended.
    """

    def __init__(self, options: ServeOptions, source: EngineSource) -> None:
        self._options = options
        self._source = source
        self._restarts_left = options.server.restart_engine
        self._exit_code = 0
        self.leaves_engine = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start, serve, end; see `run` of the module."""
        bound = _bind(self._options.server)
        client = self._new_client()
        try:
            tokenizer = self._source.load_tokenizer()
            ready = await client.start()
            self._context = self._make_context(client, tokenizer)
            await self._serve(bound, _resolved(self._options, ready))
            client = self._context.client  # another one after a restart
        except EngineDeadError as error:
            log.error("the engine did not start: %s", error)
            self._exit_code = 1
        finally:
            bound.close()
            await client.close()
            self.leaves_engine |= client.is_stuck
        return self._exit_code

    def _new_client(self) -> EngineClient:
        return EngineClient(self._source, self._on_engine_death, self._options.server.step_timeout)

    def _make_context(self, client: EngineClient, tokenizer: Tokenizer | None) -> ServerContext:
        server = self._options.server
        names = server.served_model_name or [self._options.engine.model]
        return ServerContext(client, tokenizer, names, server.max_logprobs, server.enable_prompt_tokens_details)

    async def _serve(self, bound: socket.socket, resolved: dict[str, Any]) -> None:
        """Answer HTTP until told to end, and the running requests have ended."""
        server = self._options.server
        bytes_of = {"max_body_bytes": server.max_body_mib * 2**20, "max_header_bytes": server.max_header_kib * 1024}
        access = Access(server.api_key, server.protect_all, **{name: int(size) for name, size in bytes_of.items()})
        app = ServerApp(self._context, access, resolved)
        written = _write_resolved(resolved, server)
        self._http = _HttpServer(self._uvicorn_config(app, access), lambda: self._announce(bound, written))
        self._handle_signals()
        gc.collect()
        gc.freeze()  # what was imported and loaded stays; no collection need look at it while requests wait
        _listen(bound, server, self._http.config.backlog)
        await self._http.serve(sockets=[bound])
        for task in self._tasks:
            task.cancel()

    def _uvicorn_config(self, app: Any, access: Access) -> uvicorn.Config:
        server = self._options.server
        if server.allowed_origins:
            from starlette.middleware.cors import CORSMiddleware

            app = CORSMiddleware(app, allow_origins=server.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        bounds = {"max_header_bytes": access.max_header_bytes, "client_seconds": server.client_timeout}
        return uvicorn.Config(
            app,
            http=type("Protocol", (BoundedProtocol,), bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=server.access_log,
            server_header=False,
            proxy_headers=False,
            backlog=4096,
            timeout_keep_alive=60,
            ssl_keyfile=server.ssl_keyfile or None,
            ssl_certfile=server.ssl_certfile or None,
        )

    # The end.

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """The first signal drains, a second one ends at once."""
        if self._context.draining:
            self._http.cut_all()
            return
        seconds = self._options.server.shutdown_timeout
        log.info("%s: running requests have %g s", signal.Signals(number).name, seconds)
        self._end(seconds)

    def _end(self, seconds: float) -> None:
        """Take no more requests; end those that run after `seconds`, and cut what is left a moment later."""
        self._context.draining = True
        self._http.should_exit = True
        self._start(self._end_requests(seconds))

    async def _end_requests(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._context.client.abort_all(RefusedError("shutdown", "the server ended before the answer was whole"))
        await asyncio.sleep(_LAST_SECONDS)
        self._http.cut_all()

    def _on_engine_death(self) -> None:
        if self._context.draining:
            return
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._start(self._restart())
        else:
            self._exit_code = 1
            self._end(0.0)

    async def _restart(self) -> None:
        """Start another engine; the server answers 503 meanwhile."""
        log.warning("starting the engine again; %d more restarts are left", self._restarts_left)
        await self._context.client.close()
        self.leaves_engine |= self._context.client.is_stuck
        client = self._new_client()
        try:
            await client.start()
        except (EngineStartError, EngineDeadError) as error:
            log.error("the engine did not start again: %s", error)
            self._exit_code = 1
            self._end(0.0)
            return
        self._context.client = client
        log.warning("the engine serves again")

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _announce(self, bound: socket.socket, written: Path | None) -> None:
        server = self._options.server
        host, port = bound.getsockname()[:2]
        if not server.api_key and not _is_loopback(host):
            log.warning("listening on %s without --api-key: whoever reaches it may use the model", host)
        if written is not None:
            log.info("this start's options and versions: %s", written)
        scheme = "https" if server.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {self._context.model} on {scheme}://{shown}:{port}", flush=True)


def _bind(server: ServerOptions) -> socket.socket:
    """The address, before the model is loaded for nothing; connections are taken once the engine serves.

    Without SO_REUSEADDR it is this server's alone while it loads, too. The second attempt has it: connections of an
    earlier server that are still closing are no hindrance then.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    for reuse in (0, 1):
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)  # connections inherit it
        try:
            bound.bind((server.host, server.port))
        except (OSError, OverflowError) as error:
            bound.close()
            if reuse or not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                raise _not_to_be_had(server, error) from None
        else:
            break
    return bound


def _listen(bound: socket.socket, server: ServerOptions, backlog: int) -> None:
    """Take connections, which do not hold the address once they are closing."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.listen(backlog)
    except OSError as error:
        raise _not_to_be_had(server, error) from None


def _not_to_be_had(server: ServerOptions, error: OSError | OverflowError) -> ValueError:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    why = "another program has the port; --port takes another, 0 a free one" if in_use else error
    return ValueError(f"host = {server.host!r}, port = {server.port}: cannot be listened on: {why}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolved(options: ServeOptions, ready: Ready) -> dict[str, Any]:
    """Options as `--config` takes them, and beside them what they came to, and on what."""
    versions = {"research_engine": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    facts = {"started": started, "platform": platform.platform(), "versions": versions, "engine": ready.config}
    return {**options.resolved(), "resolved": facts}


def _write_resolved(resolved: dict[str, Any], server: ServerOptions) -> Path | None:
    """Write what this start came to, so that it can be repeated and compared; a full disk does not stop the server."""
    from research_engine.loading import cache_directory

    directory = Path(server.config_dir) if server.config_dir else cache_directory() / "serve"
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S%f")
    path = directory / f"{stamp}.yaml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
    except OSError as error:
        log.warning("this start's options are not written: %s", error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # a part of it would be taken for all
        return None
    return path
