"""The flags of `research-engine serve`: every engine option, the server's own, and the spellings vLLM's users type.

Flags beat `--config FILE`, which beats the defaults. Engine options are read off `EngineOptions`, so that a new one has
its flag as soon as it exists.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from research_engine.options import EngineOptions, OptionError, check_kinds, nearest_first

API_KEY_VARIABLE = "RESEARCH_ENGINE_API_KEY"

_ALIASES = {
    "scheduler": ("--scheduling-policy",),
    "max_num_queued": ("--max-num-queued-reqs",),
    "scheduler_params": ("--scheduler-param",),
    "quantization": ("-q",),
    "tensor_parallel_size": ("-tp",),
}
_KINDS: dict[str, Any] = {"int": int, "int | None": int, "float": float, "float | None": float}


@dataclass(frozen=True)
class ServerOptions:
    """What the server itself takes.

    Args:
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        api_key: keys of which requests must carry one; none leaves the server open.
        protect_all: /metrics, /stats, /docs and the page need a key, too; /health never does.
        served_model_name: what requests may call the model; its own name when empty.
        max_logprobs: most probable tokens that a request may ask for beside each token.
        max_body_mib: MiB of a request's body.
        max_header_kib: KiB of a request's head.
        client_timeout: seconds that a client may leave what was sent to it unread, or take to send a body, before it is
            cut.
        shutdown_timeout: seconds that running requests get when the server is told to end.
        restart_engine: how often an engine process that died is started again before the server ends, too.
        step_timeout: seconds that a step may take, the policy's decision included, before the engine is taken for hung
            and its process ended, at least 0.1; 0 sets no limit.
        enable_prompt_tokens_details: usage says how many prompt tokens the prefix cache held.
        allowed_origins: origins whose pages may call the server from a browser.
        ssl_keyfile, ssl_certfile: serve HTTPS.
        log_level: critical, error, warning, info or debug.
        access_log: log every request.
        config_dir: where each start writes what it resolved; below the cache directory when empty.

    Raises:
        OptionError: naming option, value and rule.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] = ()
    protect_all: bool = False
    served_model_name: Sequence[str] = ()
    max_logprobs: int = 20
    max_body_mib: float = 32.0
    max_header_kib: float = 64.0
    client_timeout: float = 300.0
    shutdown_timeout: float = 30.0
    restart_engine: int = 0
    step_timeout: float = 300.0
    enable_prompt_tokens_details: bool = False
    allowed_origins: Sequence[str] = ()
    ssl_keyfile: str = ""
    ssl_certfile: str = ""
    log_level: str = "info"
    access_log: bool = False
    config_dir: str = ""

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("api_key", "served_model_name", "allowed_origins"):
            texts = getattr(self, name)
            if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
                shown = "***" if name == "api_key" else repr(texts)
                raise OptionError(f"{name} = {shown}: must be texts")
            if "" in texts:
                raise OptionError(f"{name} holds an empty {'key' if name == 'api_key' else 'text'}")
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port = {self.port!r}: must be from 0 to 65535")
        for name in ("max_body_mib", "max_header_kib", "client_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} = {getattr(self, name)!r}: must be finite and > 0")
        for name in ("max_logprobs", "shutdown_timeout", "restart_engine"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{name} = {getattr(self, name)!r}: must be finite and >= 0")
        if self.step_timeout != 0 and not 0.1 <= self.step_timeout < math.inf:
            raise OptionError(f"step_timeout = {self.step_timeout!r}: must be finite and >= 0.1, or 0 for no limit")
        levels = ("critical", "error", "warning", "info", "debug")
        if self.log_level not in levels:
            raise OptionError(
                f"log_level = {self.log_level!r}: must be one of {', '.join(nearest_first(self.log_level, levels))}"
            )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise OptionError("ssl_keyfile and ssl_certfile are given together or not at all")
        if self.ssl_keyfile:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except OSError as error:
                files = f"ssl_certfile = {self.ssl_certfile!r}, ssl_keyfile = {self.ssl_keyfile!r}"
                raise OptionError(f"{files}: must be a certificate and its key in PEM: {error}") from None


@dataclass(frozen=True)
class ServeOptions:
    """All of one start."""

    engine: EngineOptions
    server: ServerOptions = field(default_factory=ServerOptions)

    def resolved(self) -> dict[str, Any]:
        """As `--config` reads it; without keys."""
        values = {**dataclasses.asdict(self.engine), **dataclasses.asdict(self.server)}
        del values["api_key"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse(args: Sequence[str]) -> ServeOptions:
    """Options of a command line.

    Raises:
        OptionError: a value is out of range, or a flag asks for what this engine does not have.
        SystemExit: a flag is unknown or lacks its value (code 2), or help was asked for (0).
    """
    parser = _parser()
    given = vars(parser.parse_args(args))
    values = _from_file(given.pop("config")) if given.get("config") else {}
    values.update({name: value for name, value in given.items() if value is not None and name != "config"})
    return options_of(values)


def options_of(values: Mapping[str, Any]) -> ServeOptions:
    """From values by option name, those of vLLM's spellings included. Raises OptionError."""
    left = dict(values)
    model = left.pop("model", None)
    if not model:
        raise OptionError("no model is given: research-engine serve MODEL")
    _chunked_prefill(left)
    _fixed(left)
    names = {entry.name for entry in fields(EngineOptions)}
    engine = {name: left.pop(name) for name in list(left) if name in names}
    for entry in fields(EngineOptions):
        if str(entry.type).startswith("Mapping") and engine.get(entry.name) is not None:
            engine[entry.name] = _parameters(entry.name, engine[entry.name])
    if not left.get("api_key") and os.environ.get(API_KEY_VARIABLE):
        left["api_key"] = [os.environ[API_KEY_VARIABLE]]
    for name in ("api_key", "served_model_name", "allowed_origins"):
        if isinstance(left.get(name), str):
            left[name] = [left[name]]
    return ServeOptions(EngineOptions.of(model, engine), ServerOptions(**left))


WHOLE_PROMPTS = ("fcfs", "static_batch", "vllm_v0")
"""Policies that compute a prompt in one step wherever it fits; all others that ship split it."""


def _chunked_prefill(values: dict[str, Any]) -> None:
    """Here chunking is the scheduler's choice, so the flag is a choice among schedulers, or a check of the one given.

    To vLLM's users fcfs is an order, which its chunks keep: with chunks it means what is called chunked_prefill here.
    """
    wanted = values.pop("enable_chunked_prefill", None)
    if wanted is None:
        return
    if not isinstance(wanted, bool):
        raise OptionError(f"enable_chunked_prefill = {wanted!r}: must be True or False")
    scheduler = values.setdefault("scheduler", "fcfs")
    if wanted and scheduler == "fcfs":
        values["scheduler"] = "chunked_prefill"
    elif ":" in str(scheduler):
        raise OptionError(f"enable_chunked_prefill = {wanted}: {scheduler!r} decides that itself; leave the flag out")
    elif wanted == (scheduler in WHOLE_PROMPTS):
        does = "computes prompts whole" if wanted else "computes prompts in chunks"
        others = "any but " * wanted + ", ".join(WHOLE_PROMPTS)
        raise OptionError(
            f"enable_chunked_prefill = {wanted}: scheduler = {scheduler!r} {does}; leave the flag out, or take {others}"
        )


_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "kv_cache_dtype": (("auto",), "the KV cache has the model's dtype"),
    "tensor_parallel_size": ((1,), "one device is supported"),
    "task": (("auto", "generate"), "models that generate are supported"),
    "runner": (("auto", "generate"), "models that generate are supported"),
}
"""Flags of vLLM's that the engine has no option for: the values that ask for nothing, and what to say of others."""


def _fixed(values: dict[str, Any]) -> None:
    known = {entry.name for entry in fields(EngineOptions)}
    for name, (harmless, why) in _FIXED.items():
        if name in known or name not in values:
            continue
        value = values.pop(name)
        if value not in harmless:
            valid = ", ".join(str(v) for v in harmless if v is not None)
            raise OptionError(f"{name} = {value!r}: {why}; valid: {valid}")
    for name in ("enforce_eager", "trust_remote_code"):  # no code of a model's is ever run; see the help
        if name not in known:
            values.pop(name, None)


def _parameters(option: str, given: Any) -> dict[str, Any]:
    """A mapping, or words NAME=VALUE."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (list, tuple)) or not all(isinstance(word, str) for word in given):
        raise OptionError(f"{option} = {given!r}: must hold values by name, or texts NAME=VALUE")
    made = {}
    for word in given:
        name, equals, text = word.partition("=")
        if not equals:
            raise OptionError(f"{option} = {word!r}: must be NAME=VALUE")
        try:
            made[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            made[name] = {"true": True, "false": False}.get(text, text)
    return made


def _from_file(path: str) -> dict[str, Any]:
    import yaml

    from research_engine.yaml_text import read_yaml

    try:
        _, loaded = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"config = {path!r}: cannot be read: {error}") from None
    loaded = {} if loaded is None else loaded
    if not isinstance(loaded, Mapping):
        raise OptionError(f"config = {path!r}: must hold options by name")
    loaded = {str(name).replace("-", "_"): value for name, value in loaded.items()}
    loaded.pop("resolved", None)
    other = {alias.lstrip("-").replace("-", "_"): name for name, aliases in _ALIASES.items() for alias in aliases}
    values = {other.get(name, name): value for name, value in loaded.items() if value is not None}
    valid = sorted({action.dest for action in _parser()._actions} - {"help", "config"})
    for name in values:
        if name not in valid:
            near = ", ".join(nearest_first(name, valid)[:5])
            raise OptionError(f"config = {path!r}: there is no option {name!r}; nearest: {near}")
    return values


class _Parser(argparse.ArgumentParser):
    """Names the nearest flags for one that is unknown."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown and unknown[0].partition("=")[0] == "--model":
            self.error(f"{unknown[0]}: the model is named without a flag: {self.prog} MODEL")
        if unknown and not unknown[0].startswith("-"):
            self.error(f"unknown argument {unknown[0]!r}: one model is served, {known.model!r}")
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = ", ".join(nearest_first(unknown[0], flags)[:5])
            self.error(f"unknown argument {unknown[0]!r}; nearest: {near}")
        return known

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="research-engine serve",
        description="Serve a model over HTTP with OpenAI's protocol.",
        allow_abbrev=False,
        argument_default=None,
    )
    parser.add_argument("model", nargs="?", help="what to serve: " + _help(EngineOptions)["model"])
    parser.add_argument("--config", metavar="FILE", help="YAML with options by name; flags beat it")
    for title, kind in (("server", ServerOptions), ("engine", EngineOptions)):
        group, texts = parser.add_argument_group(title), _help(kind)
        for entry in fields(kind):
            if entry.name != "model":
                _add_flag(group, entry, texts.get(entry.name, ""))
    group = parser.add_argument_group("as vLLM spells it")
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="with no scheduler or fcfs: chunked_prefill, or fcfs; with another one, whether it is such a one",
    )
    known = {entry.name for entry in fields(EngineOptions)}
    for name, (harmless, why) in _FIXED.items():
        if name not in known:
            values = ", ".join(map(str, harmless))
            read: Any = int if isinstance(harmless[0], int) else str
            group.add_argument(_flag(name), *_ALIASES.get(name, ()), type=read, help=f"{why}: {values} alone")
    taken = {"trust_remote_code": "taken; a model's own code is never run", "enforce_eager": "taken; steps are eager"}
    for name, text in taken.items():
        if name not in known:
            group.add_argument(_flag(name), action="store_const", const=True, help=text)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(group: Any, entry: dataclasses.Field[Any], text: str) -> None:
    flags = [_flag(entry.name), *_ALIASES.get(entry.name, ())]
    default = None if entry.default is dataclasses.MISSING else entry.default
    shown = (text + ("" if default in (None, "", ()) else f" (default: {default})")).replace("%", "%%")
    kind = str(entry.type)
    if kind.startswith("bool"):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=shown)
    elif kind.startswith("Sequence"):
        group.add_argument(*flags, nargs="+", action="extend", metavar="TEXT", help=shown)
    elif kind.startswith("Mapping"):
        group.add_argument(*flags, nargs="+", action="extend", metavar="NAME=VALUE", help=shown)
    else:
        group.add_argument(*flags, type=_KINDS.get(kind, str), metavar=kind.partition(" ")[0].upper(), help=shown)


def _help(kind: type) -> dict[str, str]:
    """Option -> its text in the class's docstring."""
    section = (kind.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    texts: dict[str, str] = {}
    for match in re.finditer(r"^ {8}([a-z_, ]+): (.*(?:\n {12}.*)*)", section, re.MULTILINE):
        for name in match.group(1).split(", "):
            texts[name] = re.sub(r"\s+", " ", match.group(2))
    return texts
