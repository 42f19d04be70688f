"""/tokenize and /detokenize."""

from __future__ import annotations

from tests.server.live import LiveServer


def test_text_to_tokens_and_back(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["tokens"] == list("héllo".encode())
    assert (answer["count"], answer["max_model_len"]) == (6, 4096)
    assert len(answer["token_strs"]) == 6
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}


def test_wrong_requests_name_the_field(server: LiveServer) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [1, 259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


def test_the_tokenizers_configuration_is_told_as_remote_clients_want_it(server: LiveServer) -> None:
    config = server.get("/tokenizer_info").json()
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in config["chat_template"]
    (begin,) = server.post("/tokenize", {"prompt": config["bos_token"], "add_special_tokens": False}).json()["tokens"]
    assert begin == 257
