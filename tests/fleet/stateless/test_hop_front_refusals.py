"""Continuations that are refused, with a status, before anything of a stream is sent."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import pytest
from fastapi import HTTPException
from fleet.stateless.splice_scene import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Instance,
    Received,
    Script,
    body_of,
    load_tokenizer,
)

from pla_sglang.sim.chain import model_path

pytestmark = pytest.mark.usefixtures("published")

KINDS = [GENERATE, COMPLETIONS, CHAT]


def make_instance() -> Instance:
    tokenizer = load_tokenizer(model_path())
    return Instance(model_path(), Script(answer=[*tokenizer.encode("ab é"), tokenizer.eos_token_id]))


async def read_first_writes(kind: str, count: int) -> Received:
    received = Received()
    for write in (await make_instance().read_writes(kind, body_of(kind, "hop-1", {"pla_movable": 1})))[:count]:
        received.take(write)
    return received


@pytest.mark.parametrize("kind", KINDS)
def test_another_prompt_is_409_and_reaches_no_scheduler(kind: str) -> None:
    received = asyncio.run(read_first_writes(kind, 2))
    received.prompt = "8:0000000000000000"
    instance = make_instance()
    with pytest.raises(HTTPException, match="date, chat template or tokenizer differ") as refused:
        asyncio.run(instance.read_writes(kind, body_of(kind, "hop-2", received.continuation("hop-1"))))
    assert (refused.value.status_code, instance.manager.dispatched) == (409, [])


def test_a_chat_template_with_the_date_is_noticed_on_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    today = datetime.datetime(2026, 11, 23, 23, 59, tzinfo=datetime.UTC)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return today

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    tokenizer = load_tokenizer(model_path())
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d %B') }} " + tokenizer.chat_template)
    received = asyncio.run(read_first_writes(CHAT, 3))
    body = body_of(CHAT, "hop-2", received.continuation("hop-1"))
    same_day = make_instance()
    asyncio.run(same_day.read_writes(CHAT, body))
    assert same_day.manager.dispatched == ["hop-2"]
    today += datetime.timedelta(minutes=2)
    next_day = make_instance()
    with pytest.raises(HTTPException) as refused:
        asyncio.run(next_day.read_writes(CHAT, body))
    assert (refused.value.status_code, next_day.manager.dispatched) == (409, [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [409, 410, 503])
def test_what_a_scheduler_refuses_is_a_status(kind: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    received = asyncio.run(read_first_writes(kind, 2))
    instance = make_instance()

    def abort(req: Any) -> dict[str, Any]:
        from http import HTTPStatus

        return {"type": "abort", "message": "no such room", "status_code": HTTPStatus(status)}

    monkeypatch.setattr(instance.manager, "_find_end", abort)
    instance.manager.enable_lora = False
    with pytest.raises(HTTPException, match="no such room") as refused:
        asyncio.run(instance.read_writes(kind, body_of(kind, "hop-2", received.continuation("hop-1"))))
    assert refused.value.status_code == status
    assert instance.manager.closed == ["hop-2"]


def test_a_scheduler_that_goes_on_from_another_answer_is_noticed() -> None:
    received = asyncio.run(read_first_writes(GENERATE, 3))
    custom = received.continuation("hop-1")
    instance = make_instance()
    original = instance.manager._send

    async def send_wrong(tokenized: Any, new: list[int], reason: Any, *, is_first: bool) -> None:
        await original(tokenized, [token + 1 for token in new], reason, is_first=is_first)

    instance.manager._send = send_wrong  # type: ignore[method-assign]
    with pytest.raises(HTTPException, match="not the 3 given") as refused:
        asyncio.run(instance.read_writes(GENERATE, body_of(GENERATE, "hop-2", custom)))
    assert refused.value.status_code == 500


def test_a_stream_that_goes_on_and_was_opened_by_no_endpoint_is_refused() -> None:
    """Of an endpoint that knows nothing of hops; a whole answer is given whole."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    params = {"custom_params": {"pla_tokens": [1]}}
    with pytest.raises(HTTPException, match="cannot go on") as refused:
        make_instance().manager.generate_request(GenerateReqInput(text="a", stream=True, sampling_params=params))
    assert refused.value.status_code == 400
    make_instance().manager.generate_request(GenerateReqInput(text="a", stream=False, sampling_params=params))
