"""An engine that writes prompts by hand, without jinja, as many do; with a mistake, if it is given the name of one."""

import json
import re
import sys
from datetime import datetime

TEMPLATE = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content %}
{%- else %}
    {%- set first = 'You are helpful.' %}
{%- endif %}
{%- if strftime_now is defined %}
    {%- set today = strftime_now('%Y-%m-%d') %}
{%- else %}
    {%- set today = 'long ago' %}
{%- endif %}
{{- '<|system|>' }}
{{ first }}
Today: {{ today }}
{% if tools %}
Tools:
    {% for tool in tools %}
{{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {%- if message.role == 'assistant' %}
            {%- set content = message.content or '' %}
            {%- if '</think>' in content %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
            {{- '<|assistant|>\\n' }}
            {%- if message.reasoning_content and loop.last %}
                {{- '<think>' + message.reasoning_content + '</think>\\n' }}
            {%- endif %}
            {{- content }}
            {%- for call in message.tool_calls or [] %}
                {{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
            {%- endfor %}
            {{- eos_token + '\\n' }}
        {%- elif message.content is string %}
            {{- '<|' + message.role + '|>\\n' + message.content | trim + eos_token + '\\n' }}
        {%- else %}
            {{- '<|' + message.role + '|>\\n' }}
            {%- for part in message.content %}
                {%- if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}
            {%- endfor %}
            {{- eos_token + '\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think></think>\\n' }}
    {%- endif %}
{%- endif %}"""


def render(asked, has):  # noqa: PLR0912 - a mistake is an if
    messages, bos, eos = asked["messages"], asked["bos_token"], asked["eos_token"]
    if has("content-stripped"):
        messages = [m | {"content": m["content"].strip()} if isinstance(m.get("content"), str) else m for m in messages]
    tools = None if has("tools-ignored") else asked.get("tools")

    def to_json(value, indent=None):
        indent = None if has("tojson-indent") else 2 if has("tojson-indented") else indent
        text = json.dumps(
            value, indent=indent, ensure_ascii=has("tojson-ascii"), sort_keys=has("tojson-sorted"),
            separators=(",", ":") if has("tojson-compact") else None,
        )  # fmt: skip
        if has("tojson-html"):
            for character in "<>&'":
                text = text.replace(character, f"\\u{ord(character):04x}")
        return text

    first = "" if has("default-system-missing") else "You are helpful."
    rest = messages
    if messages[0]["role"] == "system":
        first, rest = messages[0]["content"], messages[1:]
        first = "You are helpful." if has("system-ignored") else first
    today = "long ago" if has("strftime-missing") else f"{datetime.now():%Y-%m-%d}"
    text = "" if has("bos-missing") else bos * 2 if has("bos-twice") else bos
    text += f"<|system|>{'' if has('newline-eaten') else chr(10)}{first}\nToday: {today}\n"
    if tools:
        text += "Tools:\n" + "".join(f"{to_json(tool, 2)}\n" for tool in tools)
    if has("last-only"):
        rest = rest[-1:]
    for number, message in enumerate(rest):
        role, content = message["role"], message.get("content")
        if role == "assistant":
            content = content or ""
            if isinstance(content, list):
                raise ValueError("an answer's content is a text")
            if "</think>" in content and not has("thoughts-kept"):
                content = content.split("</think>")[-1].lstrip("\n")
            text += "<|assistant|>\n"
            if message.get("reasoning_content") and (number == len(rest) - 1 or has("reasoning-kept")):
                text += f"<think>{message['reasoning_content']}</think>\n"
            text += content
            for call in message.get("tool_calls") or []:
                if not has("tool-calls-ignored"):
                    text += f"<call>{call['function']['name']} {to_json(call['function']['arguments'])}</call>"
        elif isinstance(content, str):
            text += f"<|{role}|>\n{content if has('trim-ignored') else content.strip()}"
        else:
            texts = [part["text"] if part["type"] == "text" else "<image>" for part in content]
            texts = texts[:1] if has("parts-first") else texts
            text += f"<|{role}|>\n" + ("\n" if has("parts-lines") else "").join(texts)
        text += eos + "\n"
    opens = asked["add_generation_prompt"] and not has("generation-prompt-missing")
    if opens or has("generation-prompt-always"):
        text += "<|assistant|>\n"
        more = asked.get("chat_template_kwargs", {})
        if not more.get("enable_thinking", True) and not has("enable_thinking-ignored"):
            text += "<think></think>\n"
    if has("newline-added"):
        text += "\n"
    return re.sub(r"\s+$", "", text) if has("text-rstripped") else text


def main():
    mistakes = sys.argv[1:]
    for line in sys.stdin:
        try:
            answer = render(json.loads(line), mistakes.__contains__)
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
