"""Chat templates: the same prompts as transformers, and no way out of the sandbox."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from oxidize.runtime.chat import ChatTemplate
from oxidize.runtime.errors import BundleError, UsageError
from oxidize.runtime.manifest import TokenizerFiles

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}
{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{% endif %}"""

TOOLS = """{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- call.name ~ '(' ~ (call.arguments | tojson(indent=2)) ~ ')' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- message.role + ': ' + message.content + eos_token }}
{%- endfor %}"""

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{%- if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + date_string + '\n\n' + ns.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

THINKING = """{%- for message in messages %}
    {{- message.role }}
    {%- set thought = message.reasoning_content %}
    {%- if thought is defined %}{{ '<think>' ~ thought ~ '</think>' }}{% endif %}
    {%- if message.content is defined %}{{ message.content.split('</x>')[-1].strip() }}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "tools": TOOLS, "turns": TURNS, "headers": HEADERS, "thinking": THINKING}

USER = {"role": "user", "content": "  Grüße <b>\"you\"</b> & 'me' 👩🏽‍💻\n"}
REPLY = {"role": "assistant", "content": "Hello.\t "}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be kind."}, USER],
    [USER, REPLY, {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}],
    [USER, {**REPLY, "tool_calls": None, "thinking": "hm"}],
    [USER, {"role": "assistant", "content": "x", "reasoning_content": None, "tool_calls": []}],
]
TOOL = {
    "type": "function",
    "function": {"name": "wéather", "parameters": {"a": [1, 2.5, True, None], "<": "'"}},
}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Zürich", "n": 3}}}],
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), **SPECIAL)


def both(reference: PreTrainedTokenizerFast, template: str, messages: list[Any], **settings: Any) -> tuple[str, str]:
    variables = settings.pop("variables", {})
    ours = ChatTemplate(template, SPECIAL).render(messages, **settings, variables=variables)
    settings.setdefault("add_generation_prompt", True)
    theirs = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **settings, **variables)
    return ours, str(theirs)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_prompts_equal_those_of_transformers(
    reference: PreTrainedTokenizerFast, name: str, messages: list[Any], prompt: bool
) -> None:
    ours, theirs = both(reference, TEMPLATES[name], messages, add_generation_prompt=prompt)
    assert ours == theirs
    assert "Grüße" in ours


def test_tools_and_calls_equal_those_of_transformers(reference: PreTrainedTokenizerFast) -> None:
    ours, theirs = both(reference, TOOLS, [USER, CALL], tools=[TOOL])
    assert ours == theirs
    assert '"wéather"' in ours
    assert '"city": "Zürich"' in ours


def test_parts_and_variables_equal_those_of_transformers(reference: PreTrainedTokenizerFast) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}]
    ours, theirs = both(reference, TURNS, parts)
    assert ours == theirs == "<s><start_of_turn>user\nonetwo<end_of_turn>\n<start_of_turn>model\n"
    ours, theirs = both(reference, THINKING, [USER], variables={"enable_thinking": False})
    assert ours == theirs
    assert ours.endswith("</think>")


def test_variables_cannot_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "mine"}], variables={"messages": [{"content": "x"}]}) == "mine"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__.__base__.__subclasses__() }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '%s' | attr('__class__') | attr('__base__') }}",
    "{{ self._TemplateReference__context.environment.globals }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, SPECIAL).render([USER])
    except (BundleError, UsageError) as error:
        assert "\n" not in str(error)
    else:
        assert text == ""  # jinja2 calls the forbidden attribute undefined, and shows nothing


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace({'_x': 1}) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_a_namespace_has_no_underscore_names(source: str) -> None:
    with pytest.raises(BundleError, match="'_x'"):
        ChatTemplate(source, SPECIAL).render([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' ", "{% generation %}", "{% nonsense %}", "{{ 1 | nofilter }}"])
def test_a_malformed_template_is_a_bundle_error(source: str) -> None:
    with pytest.raises(BundleError, match="not a valid template") as caught:
        ChatTemplate(source, SPECIAL)
    assert "\n" not in str(caught.value)


def test_refusals_are_usage_errors_in_the_words_of_the_template() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        ChatTemplate(TURNS, SPECIAL).render([REPLY])
    with pytest.raises(UsageError, match="no attribute 'nothing'"):
        ChatTemplate("{{ messages[0].nothing.more }}", SPECIAL).render([USER])
    with pytest.raises(UsageError, match="at least one message"):
        ChatTemplate(CHATML, SPECIAL).render([])
    with pytest.raises(UsageError, match="object with role"):
        ChatTemplate(CHATML, SPECIAL).render(["hi"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="not object"):
        ChatTemplate(CHATML, SPECIAL).render([{"role": "user", "content": object()}])


def test_a_template_is_read_from_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("{{ bos_token }}é\r\n{{ eos_token }}\n".encode())
    files = TokenizerFiles("tokenizer.json", "chat_template.jinja", "<s>", None, "")
    assert ChatTemplate.load(tmp_path, files).render([USER]) == "<s>é\n"
    with pytest.raises(BundleError, match="cannot read"):
        ChatTemplate.load(tmp_path / "elsewhere", files)


def test_without_a_template_the_remedy_is_raw(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--raw"):
        ChatTemplate.load(tmp_path, TokenizerFiles("tokenizer.json", None, None, None, ""))
