"""In which formats ports, sweeps, templates and tokenizers are reported."""

from llamadiff.report.formats import Format

OF_PORT = (Format("json", (".json",), "extras.port.page:as_json", plain=True),)
OF_TEMPLATES = (Format("json", (".json",), "extras.templates.page:as_json", plain=True),)
OF_TOKENS = (Format("json", (".json",), "extras.tokens.page:as_json", plain=True),)
OF_SWEEP = (Format("markdown", (".md", ".markdown"), "extras.sweep.page:sweep_to_markdown", plain=True),)
