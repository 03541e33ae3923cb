"""A file's chat templates against its checkpoint's, as texts: the first place where they part is said, escaped once."""

from __future__ import annotations

import json

import pytest
from models.gguf_file import write_gguf

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.templates.apart import templates_in, text_parting
from llamadiff.ext.prompt.tokens.of_checkpoint import open_tokenizers
from llamadiff.report.terminal.escape import escape_line

LONG = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"


def named(**templates):
    return [{"name": name, "template": text} for name, text in templates.items()]


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        ("a\nb", "a\nb\n", None),
        ("a\r\nb", "a\nb", None),
        ("a\nbc", "a\nbd", (2, "bc", "bd")),
        ("a\n", "a\nb", (1, "a", r"a\nb")),
        (LONG + "{{ '<|im_end|>' }}", LONG + "{{ '<|im_end|>\\n' }}",
         (1, "...ent }}{{ '<|im_end|>' }}", r"...ent }}{{ '<|im_end|>\\n' }}")),
        (LONG, LONG.replace("\\n", "\n"),
         (1, r"...tart|>' + m.role + '\\n' + m.content }}", r"...tart|>' + m.role + '\n' + m.content }}")),
    ],
)  # fmt: skip
def test_the_first_place(ours, theirs, shown):
    found = text_parting(ours, theirs)
    assert (found and (found.line, *map(escape_line, (found.ours, found.theirs)))) == shown


@pytest.mark.parametrize(
    ("files", "config", "found"),
    [
        ({}, {"chat_template": "a"}, {"default": "a"}),
        ({}, {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}, 3]},
         {"default": "a", "rag": "b"}),
        ({"chat_template.jinja": "a"}, {}, {"default": "a"}),
        ({"chat_template.jinja": "a", "additional_chat_templates/rag.jinja": "b"}, {}, {"default": "a", "rag": "b"}),
        ({"chat_template.json": '{"chat_template": "a"}'}, {}, {"default": "a"}),
        ({"chat_template.jinja": "a"}, {"chat_template": "b"}, {"default": "b"}),  # as the converter takes it
        ({"chat_template.json": "[3]"}, {"chat_template": None}, {}),
    ],
)  # fmt: skip
def test_where_a_checkpoint_has_them(tmp_path, files, config, found):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    assert templates_in(tmp_path, config) == found


@pytest.mark.parametrize(
    ("fields", "config", "says"),
    [
        ({"": "a"}, {"chat_template": "a\n"}, {}),
        ({}, {}, {}),
        ({"": "a"}, {}, {}),  # somebody gave it one
        ({}, {"chat_template": "a"},
         {"": "is not in the file: llama.cpp takes ChatML for chats; the checkpoint has one; convert m.gguf again"}),
        ({"": "a", ".rag": "c"}, {"chat_template": named(default="b", rag="c")},
         {"": "parts at line 1: `a` in the file, `b` in the checkpoint; convert m.gguf again"}),
        ({"": "a", ".rag": "c"}, {"chat_template": named(default="a", rag="d")},
         {".rag": "parts at line 1: `c` in the file, `d` in the checkpoint; convert m.gguf again"}),
    ],
)  # fmt: skip
def test_the_checkpoints_template_is_the_truth(tmp_path, fields, config, says):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    own, says = ({f"tokenizer.chat_template{key}": text for key, text in each.items()} for each in (fields, says))
    found = open_tokenizers(tmp_path).oddities(ModelFile(write_gguf(tmp_path / "m.gguf", own)))
    assert {each.where: each.says for each in found} == says
