"""Chat templates: conversations are adapted to what a template expects, and nothing else is changed."""

from __future__ import annotations

import pytest
from paddock_runner.errors import UnsupportedError, UsageError
from paddock_runner.text.template import ChatTemplate, TemplateRefused

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALLING = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments ARGS }}{% endfor %}{% endfor %}"
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
CONVERSATION = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_text_parts_become_text_where_the_template_wants_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(PLAIN).render([{"role": "user", "content": parts}]) == "<user>a\nb</user><assistant>"


def test_text_becomes_a_part_where_the_template_wants_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": "abc"}]) == "abc;"


def test_null_content_is_empty_and_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "assistant", "content": None}]
    assert ChatTemplate(PLAIN).render(messages, add_generation_prompt=False) == "<assistant></assistant>"
    assert messages == [{"role": "assistant", "content": None}]


def test_arguments_are_objects_for_templates_that_write_json_and_text_for_those_that_print() -> None:
    assert ChatTemplate(CALLING.replace("ARGS", "| tojson")).render(CONVERSATION) == '{"a": "é"}'
    assert ChatTemplate(CALLING.replace("ARGS", "")).render(CONVERSATION) == '{"a": "é"}'
    assert ChatTemplate(CALLING.replace("ARGS", "~ ''")).render(CONVERSATION) == '{"a": "é"}'
    assert ChatTemplate(CALLING.replace("ARGS", "+ ''")).render(CONVERSATION) == '{"a": "é"}'


def test_arguments_that_are_no_object_stay_text() -> None:
    broken = [{**CONVERSATION[1], "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": '}}]}]
    assert ChatTemplate(CALLING.replace("ARGS", "| tojson")).render(broken) == '"{\\"a\\": "'


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(PLAIN).render(messages, add_generation_prompt=False) == "<system>x</system>"
    assert ChatTemplate(PLAIN + "{# developer #}").render(messages, add_generation_prompt=False) == "<developer>x</developer>"


def test_reasoning_comes_under_the_name_that_the_template_reads() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        template = ChatTemplate("{% for m in messages %}{{ m." + key + " }}{% endfor %}")
        for told in ("reasoning_content", "reasoning"):
            assert template.render([{"role": "assistant", "content": "", told: "hm"}]) == "hm"


def test_ids_of_calls_become_nine_characters_for_templates_that_insist() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('no') }}{% endif %}"
        "{{ c.id }}={% endfor %}{{ m.tool_call_id or '' }}{% endfor %}"
    )
    text = ChatTemplate(source).render([*CONVERSATION, {"role": "tool", "tool_call_id": "call_0123456789", "content": "1"}])
    first, second = text.split("=")
    assert first == second and len(first) == 9


def test_missing_tools_are_left_undefined_only_when_none_does_not_work() -> None:
    assert ChatTemplate("{% if tools is none %}none{% endif %}").render([]) == "none"
    assert ChatTemplate("{% if tools is defined %}{% for t in tools %}{% endfor %}{% endif %}ok").render([]) == "ok"


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    template = ChatTemplate("plain", named={"tool_use": "tools: {{ tools|length }}"})
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"type": "function", "function": {"name": "f"}}]) == "tools: 1"


def test_the_last_message_can_be_continued() -> None:
    template = ChatTemplate(PLAIN)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
    assert template.render(messages, continue_final=True) == "<user>hi</user><assistant>Once upon"
    with pytest.raises(UsageError, match="continued"):
        template.render([{"role": "assistant", "content": ""}], continue_final=True)


def test_thinking_options_use_the_names_that_the_template_reads() -> None:
    assert ChatTemplate("{{ enable_thinking }}").thinking_options(False, "low") == {"enable_thinking": False}
    assert ChatTemplate("{{ thinking }}{{ reasoning_effort }}").thinking_options(True, "low") == {"thinking": True, "reasoning_effort": "low"}
    assert ChatTemplate(PLAIN).thinking_options(True, "low") == {}


def test_what_a_template_refuses_is_the_callers_mistake_with_the_templates_words() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate") as refused:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])
    assert refused.value.http_status == 400 and refused.value.facts["reason"] == "TemplateError: roles must alternate"


def test_without_a_template_a_chat_is_refused_with_a_hint() -> None:
    with pytest.raises(UnsupportedError, match=r"no chat template.*v1/completions"):
        ChatTemplate("").render([{"role": "user", "content": "x"}])


def test_special_tokens_dates_and_generation_blocks_are_there() -> None:
    source = "{{ bos_token }}{{ strftime_now('%Y') | length }}{% generation %}{{ eos_token }}{% endgeneration %}{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}"
    assert ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render([]) == "<s>4</s>1"


def test_a_tool_is_told_as_it_was_described_without_what_nobody_set() -> None:
    whole = ChatTemplate("{% for t in tools %}{{ t | tojson }}{% endfor %}")
    given = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": None}}
    plain = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert whole.render([], [given]) == whole.render([], [plain]) == '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    assert whole.render([], [{"type": "function", "function": {**plain["function"], "strict": True, "description": ""}}]) == whole.render([], [plain])
    by_name = ChatTemplate("{% for t in tools %}{{ t.function.name + ': ' + t.function.description }} {{ t.function.parameters.properties | length }}{% endfor %}")
    assert by_name.render([], [{"type": "function", "function": {"name": "f"}}]) == "f:  0"


def test_a_call_without_arguments_has_none_of_them() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": None}}]}]
    assert ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}").render(messages) == "{}"
