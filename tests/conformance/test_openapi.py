"""The API's description is true: its examples are answered, and requests made from it (by schemathesis) find no 5xx and no answer that it does not tell of."""

from __future__ import annotations

from typing import Any

import pytest
from paddock_runner.front.described import EXAMPLES

from tests.conformance.live import KEY, Live

NEEDS_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings")
N_EXAMPLES, N_EXAMPLES_FULL = 2, 150


@pytest.mark.parametrize("path, title", [(path, title) for path, shown in EXAMPLES.items() if path not in NEEDS_VECTORS for title in shown])
def test_every_example_of_the_description_is_answered(tools: Live, path: str, title: str) -> None:
    body = EXAMPLES[path][title]
    tools.say('{"city": "Rome"}' if {"response_format", "format"} & set(body) else "yes" if "guided_choice" in body else "Hi")
    answer = tools.post(path, body, headers={"accept": "application/json, text/event-stream", "authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text
    assert ("error" not in answer.text[:20] and "x-paddock-ignored-fields" not in answer.headers) or "thinking" in str(body)


@pytest.mark.parametrize("n", [N_EXAMPLES, pytest.param(N_EXAMPLES_FULL, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_requests_made_from_the_description_find_no_5xx_and_no_surprise(tools: Live, n: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi import checks

    tools.say("Hi")
    wanted = [checks.content_type_conformance, checks.response_schema_conformance, checks.status_code_conformance, checks.response_headers_conformance]
    headers = {"authorization": f"Bearer {KEY}"}
    api = schemathesis.openapi.from_url(tools.url + "/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 30
    wrong: list[str] = []
    for operation in operations:

        @settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
        @given(case=operation.as_strategy())
        def answers(case: Any) -> None:
            answer = case.call(headers=headers)
            # The scripted engine does not look at masks: its answers leave the grammar, which ends in this 500.
            if answer.status_code >= 500 and not ("that the grammar does not allow" in answer.text or answer.status_code == 501):
                raise AssertionError(f"{answer.status_code} {answer.text[:300]} for {case.body!r:.500}")
            case.validate_response(answer, checks=wanted)

        try:
            answers()
        except (AssertionError, BaseExceptionGroup) as error:
            wrong.append(f"{operation.label}: {error}")
    assert not wrong, "\n".join(wrong)[:4000]
    assert tools.front.desk.n_open == 0
