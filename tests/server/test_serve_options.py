"""Flags as vLLM's users type them, a file beneath them, and an error by name for what is not there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import schedulers
from research_engine.options import EngineOptions, OptionError
from research_engine.server.serve_options import WHOLE_PROMPTS, ServeOptions, _parser, options_of, parse


def test_flags_as_vllms_users_type_them() -> None:
    words = (
        "dummy:tiny --host 0.0.0.0 --port 9000 --api-key a b --served-model-name x y --gpu-memory-utilization 0.8 "
        "--max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 256 --dtype float32 --tensor-parallel-size 1 "
        "--no-enable-prefix-caching --kv-cache-dtype auto --block-size 32 --swap-space 1 --seed 7 --enforce-eager "
        "--trust-remote-code --quantization awq -tp 1 --task generate --load-format dummy --scheduling-policy vtc "
        "--scheduler-params weight_output=3.0 --max-num-queued-reqs 9"
    )
    options = parse(words.split())
    engine, server = options.engine, options.server
    assert (server.host, server.port, server.api_key, server.served_model_name) == (
        "0.0.0.0",
        9000,
        ["a", "b"],
        ["x", "y"],
    )
    assert (engine.gpu_memory_utilization, engine.max_model_len, engine.max_num_seqs) == (0.8, 512, 8)
    assert (engine.max_num_batched_tokens, engine.dtype, engine.enable_prefix_caching) == (256, "float32", False)
    assert engine.quantization == "awq"
    assert (engine.block_size, engine.swap_space, engine.seed, engine.load_format) == (32, 1.0, 7, "dummy")
    assert (engine.scheduler, engine.scheduler_params, engine.max_num_queued) == ("vtc", {"weight_output": 3.0}, 9)


def test_every_engine_option_has_its_flag() -> None:
    flags = {action.dest for action in _parser()._actions}
    assert {entry.name for entry in fields(EngineOptions)} <= flags


@pytest.mark.parametrize(
    ("flags", "scheduler"),
    [("", "chunked_prefill"), ("--enable-chunked-prefill", "chunked_prefill"), ("--no-enable-chunked-prefill", "fcfs"),
     ("--no-enable-chunked-prefill --scheduler vllm_v0", "vllm_v0"), ("--scheduler fcfs", "fcfs"),
     ("--enable-chunked-prefill --scheduling-policy fcfs", "chunked_prefill"),
     ("--enable-chunked-prefill --scheduling-policy priority", "priority")],
)  # fmt: skip
def test_chunked_prefill_is_a_choice_of_scheduler(flags: str, scheduler: str) -> None:
    assert parse(["m", *flags.split()]).engine.scheduler == scheduler


@pytest.mark.parametrize("name", schedulers.available())
def test_the_policies_that_compute_prompts_whole_are_those_that_give_a_rest_of_the_budget_to_none(name: str) -> None:
    view = SimpleNamespace(max_num_batched_tokens=10, uncomputed_tokens=lambda request: 8)
    request = SimpleNamespace(is_decoding=False)
    assert (schedulers.create(name).quota(request, view, 5) == 0) == (name in WHOLE_PROMPTS)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--no-enable-chunked-prefill --scheduler chunked_prefill",
            "computes prompts in chunks; .* fcfs, stat",
        ),
        ("--no-enable-chunked-prefill --scheduler vtc", "scheduler = 'vtc' computes prompts in chunks"),
        ("--enable-chunked-prefill --scheduler static_batch", "computes prompts whole; .* any but fcfs"),
        ("--enable-chunked-prefill --scheduler my.py:Mine", "'my.py:Mine' decides that itself"),
        ("--port 70000", "port = 70000"),
        ("--block-size 0", "block_size = 0"),
        ("--dtype float8", "dtype = 'float8'"),
        ("--log-level loud", "log_level = 'loud'"),
        ("--max-body-mib 0", "max_body_mib"),
        ("--scheduler-params watermark", "NAME=VALUE"),
        ("--ssl-keyfile x", "ssl_certfile"),
        ("--ssl-keyfile x.pem --ssl-certfile y.pem", "ssl_certfile = 'y.pem', ssl_keyfile = 'x.pem': must be a cert"),
        ("--max-body-mib inf", "max_body_mib = inf"),
        ("--step-timeout 1e-9", "step_timeout = 1e-09: must be finite and >= 0.1, or 0 for no limit"),
        ("--step-timeout nan", "step_timeout = nan"),
        ("--config /nonexistent.yaml", "cannot be read"),
    ],
)
def test_a_wrong_value_is_named(flags: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse(["m", *flags.split()])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", "abc", "port = 'abc': must be an integer"),
        ("port", True, "port = True: must be an integer"),
        ("host", 5, "host = 5: must be a text"),
        ("client_timeout", "soon", "client_timeout = 'soon': must be a number"),
        ("access_log", "no", "access_log = 'no': must be True or False"),
        ("restart_engine", 1.5, "restart_engine = 1.5: must be an integer"),
        ("allowed_origins", 5, "allowed_origins = 5: must be texts"),
        ("served_model_name", [1], "served_model_name = .1.: must be texts"),
        ("served_model_name", [""], "served_model_name holds an empty text"),
        ("api_key", "", "api_key holds an empty key"),
        ("scheduler_params", 5, "scheduler_params = 5: must hold values by name"),
        ("enable_chunked_prefill", "no", "enable_chunked_prefill = 'no': must be True or False"),
    ],
)
def test_a_file_with_a_value_of_another_kind_is_told(name: str, value: object, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        options_of({"model": "m", name: value})


def test_a_wrong_key_is_refused_without_being_shown() -> None:
    with pytest.raises(OptionError, match=r"api_key = \*\*\*: must be texts"):
        options_of({"model": "m", "api_key": [123456]})


def test_a_model_is_needed() -> None:
    with pytest.raises(OptionError, match="no model"):
        parse([])


def test_an_unknown_flag_is_a_users_mistake_with_the_nearest_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["m", "--max-num-seq", "3"], ["m", "--port"], ["m", "--port", "x"]):
        with pytest.raises(SystemExit) as stop:
            parse(words)
        assert stop.value.code == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "m", "--port", "1"], "--model: the model is named without a flag: research-engine serve MODEL"),
        (["--model=m"], "--model=m: the model is named without a flag: research-engine serve MODEL"),
        (["m", "other", "--port", "1"], "unknown argument 'other': one model is served, 'm'"),
    ],
)
def test_a_model_given_in_another_way_is_told_how(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"research-engine serve: {told}\n"


def written(tmp_path: Path, **values: Any) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_file_holds_any_of_them_and_flags_beat_it(tmp_path: Path) -> None:
    values = {
        "model": "dummy:tiny",
        "max-num-seqs": 8,
        "port": 1,
        "scheduling_policy": "sjf",
        "enable_chunked_prefill": None,
    }
    options = parse(["--config", written(tmp_path, **values), "--port", "2"])
    assert (options.engine.model, options.engine.max_num_seqs, options.server.port) == ("dummy:tiny", 8, 2)
    assert options.engine.scheduler == "sjf"
    with pytest.raises(OptionError, match="nearest: max_num_seqs"):
        parse(["--config", written(tmp_path, max_num_seq=8)])
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(OptionError, match="options by name"):
        parse(["--config", str(tmp_path / "list.yaml")])


def test_a_file_that_becomes_more_than_a_configuration_is_refused_before_it_does(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
    path = tmp_path / "serve.yaml"
    for text, says in (("\n".join(lines), "more than 100,000 values"), ("model: &a [*a]", "what it lies in")):
        path.write_text(text)
        with pytest.raises(OptionError, match=f"config = .*serve.yaml': cannot be read: (?s:.*){says}"):
            parse(["--config", str(path)])
    path.write_text("")  # as good as none
    assert parse(["m", "--config", str(path)]).engine.model == "m"


def test_what_a_start_writes_starts_the_same_again(tmp_path: Path) -> None:
    words = "dummy:tiny --api-key secret --served-model-name a --scheduler vtc --scheduler-params weight_output=3.0"
    options = parse(words.split())
    resolved = options.resolved()
    assert "secret" not in str(resolved)
    again = parse(["--config", written(tmp_path, **resolved, resolved={"versions": {"python": "3"}})])
    assert again.engine == options.engine
    assert ServeOptions(again.engine, again.server).resolved() == resolved
