"""The rule for lines that agent clients change in each request: these lines go, nothing else does."""

from __future__ import annotations

from paddock_runner.turns.steady import steady

BILLING = "x-anthropic-billing-header: cc_version=2.0.1; cch=a91f3;\n"


def test_the_billing_line_goes_from_instructions_and_nothing_around_it_changes() -> None:
    for role in ("system", "developer"):
        assert steady([{"role": role, "content": BILLING + "You are an agent.\n\nx"}]) == [{"role": role, "content": "You are an agent.\n\nx"}]
    assert steady([{"role": "system", "content": "a\n" + BILLING.strip()}]) == [{"role": "system", "content": "a\n"}]


def test_a_user_may_speak_of_the_billing_line() -> None:
    messages = [{"role": "user", "content": BILLING}]
    assert steady(messages) == messages and steady(messages)[0] is messages[0]


def test_lines_that_only_tell_the_tokens_left_go_from_every_message_and_part() -> None:
    line = "<total_tokens>91234 tokens left</total_tokens>\n"
    parts = [{"type": "text", "text": f"hello\n{line}there"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    found = steady([{"role": "user", "content": parts}, {"role": "tool", "content": f"42\n  {line}"}])
    assert found == [{"role": "user", "content": [{"type": "text", "text": "hello\nthere"}, parts[1]]}, {"role": "tool", "content": "42\n"}]


def test_the_same_words_within_a_line_stay() -> None:
    messages = [{"role": "user", "content": "what is <total_tokens>5</total_tokens> for?"}, {"role": "assistant", "content": None}]
    assert all(new is old for new, old in zip(steady(messages), messages, strict=True))


def test_two_requests_of_one_conversation_become_the_same_prompt() -> None:
    first, second = ([{"role": "system", "content": f"x-anthropic-billing-header: cch={cch};\nBe brief."}] for cch in ("1", "2"))
    assert steady(first) == steady(second)
