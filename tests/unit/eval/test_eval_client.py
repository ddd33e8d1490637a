"""The client's protocol: what is sent, what is read, what is tried again, what is an error."""

from __future__ import annotations

import asyncio

import pytest
from eval_server import serving

from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.eval.client import CompletionClient, Sampling, ServerError, normalize_url

SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_tokens=128)


def ask(url, api="chat", prompt="Q", identify=True, **options):
    async def run():
        client = CompletionClient(url, api, SAMPLING, retries=2, backoff=0.01, **options)
        async with client:
            identity = await client.identify() if identify else None
            return identity, await client.complete(prompt)

    return asyncio.run(run())


@pytest.fixture
def server():
    with serving(lambda prompt, times: f"re: {prompt}") as found:
        yield found


def test_chat_sends_the_openai_request(server):
    identity, completion = ask(server.url + "/v1/")
    assert server.bodies == [
        {
            "model": "tiny-model",
            "messages": [{"role": "user", "content": "Q"}],
            "temperature": 0.6,
            "top_p": 0.95,
            "max_tokens": 128,
        }
    ]
    assert (completion.text, completion.finish_reason, completion.tokens) == ("re: Q", "stop", 11)
    assert identity == {
        "model": "tiny-model",
        "model_path": "tiny",
        "quantization": "fp8",
        "weight_version": "7",
    }


def test_generate_sends_the_native_request(server):
    _, completion = ask(server.url, api="generate")
    assert server.bodies == [
        {
            "text": "Q",
            "sampling_params": {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 128},
        }
    ]
    assert (completion.text, completion.finish_reason, completion.tokens) == ("re: Q", "stop", 11)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_tried_again(server, status):
    server.faults = [(status, {}), (status, {})]
    assert ask(server.url)[1].text == "re: Q"
    assert len(server.bodies) == 3


def test_a_lasting_failure_is_an_error(server):
    server.faults = [(500, {"error": "boom"})] * 9
    with pytest.raises(ServerError, match=r"HTTP 500: .*boom.*the same command resumes"):
        ask(server.url)
    assert len(server.bodies) == 3


def test_a_refusal_is_not_tried_again(server):
    server.faults = [(400, {"message": "no chat template"})] * 9
    with pytest.raises(ServerError, match=r"no chat template.*use --endpoint generate"):
        ask(server.url)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[1]",
        {},
        {"choices": []},
        {"choices": [{"message": None, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "x"}}]},
    ],
)
def test_a_reply_that_is_no_completion_is_an_error(server, body):
    server.faults = [(200, body)]
    with pytest.raises(ServerError, match="the reply follows the protocol"):
        ask(server.url)


@pytest.mark.parametrize(
    "body", [{"text": "x"}, {"meta_info": {"finish_reason": {"type": "stop"}}}]
)
def test_a_generate_reply_that_is_no_completion_is_an_error(server, body):
    server.faults = [(200, body)]
    with pytest.raises(ServerError, match="the reply follows the protocol"):
        ask(server.url, api="generate")


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_an_aborted_response_is_no_sample(server, api):
    server.finish_reason = "abort"
    with pytest.raises(ServerError, match="an aborted response is no sample"):
        ask(server.url, api=api)


def test_reasoning_without_content_is_read(server):
    message = {"content": None, "reasoning_content": "hm"}
    server.faults = [(200, {"choices": [{"message": message, "finish_reason": "length"}]})]
    _, completion = ask(server.url)
    assert (completion.text, completion.reasoning, completion.tokens) == ("", "hm", None)


def test_an_unreachable_server_is_named():
    with serving(str) as server:
        url = server.url
    with pytest.raises(ServerError, match=f"{url}: /v1/models: ConnectError.*did not answer"):
        ask(url)


def test_a_server_without_a_model_list_is_refused(server):
    with pytest.raises(ServerError, match="lists the model that it serves"):
        ask(server.url + "/elsewhere")


def test_the_key_is_sent(server, monkeypatch):
    seen = []
    handler = server.RequestHandlerClass
    monkeypatch.setattr(handler, "log_request", lambda self, *_: seen.append(self.headers))
    ask(server.url, api_key="secret")
    assert {headers["Authorization"] for headers in seen} == {"Bearer secret"}


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://host", ""])
def test_a_bad_url_is_refused(url):
    with pytest.raises(ConfigError, match="http://"):
        normalize_url(url)


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"max_tokens": 0}]
)
def test_bad_sampling_is_refused(values):
    with pytest.raises(ConfigError):
        Sampling(**values)
