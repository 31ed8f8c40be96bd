"""Keys: every header that clients send one in, right and wrong; what a key for inference may not see; no key in the log."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from paddock_runner.edge.auth import key_of

from tests.conformance.live import CHATML, Live

ADMIN, PHONE = "pk-admin-0123456789", "pk-phone-0123456789"
OPEN = ("/health", "/health/live", "/health/ready", "/openapi.json", "/api/version")


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server with one key of each scope."""
    server = Live(CHATML, keys=(key_of(ADMIN), key_of(PHONE, "inference")))
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer KEY"}, {"authorization": "bearer KEY"}, {"AUTHORIZATION": "BEARER   KEY"}, {"Authorization": "KEY"},
        {"x-api-key": "KEY"}, {"X-Api-Key": "KEY"}, {"api-key": "KEY"}, {"Api-Key": "Bearer KEY"},
        {"Authorization": "Bearer not-needed", "x-api-key": "KEY"}, {"x-api-key": "none", "Authorization": "Bearer KEY"},
    ],
)  # fmt: skip
def test_every_spelling_of_the_right_key_is_let_in_and_of_a_wrong_one_is_not(server: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/api/tags"):
        for key, status in ((ADMIN, 200), (PHONE, 200), (ADMIN[:-1], 401), (ADMIN + "x", 401), ("no", 401)):
            sent = {k: v.replace("KEY", key) for k, v in headers.items()}
            assert httpx.get(server.url + path, headers=sent).status_code == status, (path, key)


@pytest.mark.parametrize("headers", [{"x-goog-api-key": ADMIN}, {"Authorization": f"Basic {ADMIN}"}, {"cookie": f"key={ADMIN}"}, {"proxy-authorization": f"Bearer {ADMIN}"}])
def test_key_in_another_place_is_no_key(server: Live, headers: dict[str, str]) -> None:
    assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 401
    assert httpx.get(server.url + f"/v1/models?key={ADMIN}&api_key={ADMIN}").status_code == 401


def test_key_for_inference_sees_neither_metrics_nor_state(server: Live) -> None:
    for path in ("/metrics", "/v1/paddock/state"):
        assert httpx.get(server.url + path, headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200
        answer = httpx.get(server.url + path, headers={"authorization": f"Bearer {PHONE}"})
        assert answer.status_code == 403 and "inference only" in answer.text
        assert httpx.get(server.url + path).status_code == 401


def test_what_needs_no_key_says_nothing_about_requests(server: Live) -> None:
    for path in OPEN:
        assert httpx.get(server.url + path).status_code == 200, path


def test_there_is_no_management_on_the_port(server: Live) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {ADMIN}"}) as client:
        for path in ("/api/pull", "/api/push", "/api/create", "/api/delete", "/api/copy", "/v1/load", "/v1/unload", "/admin", "/slots/0", "/props"):
            for method in ("POST", "DELETE", "PUT"):
                assert client.request(method, path, json={"model": "org/repo"}).status_code in (400, 404, 405, 501), (method, path)


def test_no_key_in_the_log(server: Live, capfd: pytest.CaptureFixture[str]) -> None:
    for key in (ADMIN, PHONE, "pk-wrong-key-0123456789"):
        httpx.get(server.url + "/v1/models", headers={"authorization": f"Bearer {key}", "x-api-key": key})
    said = "".join(capfd.readouterr())
    assert not any(key in said for key in (ADMIN, PHONE, "pk-wrong-key-0123456789"))
