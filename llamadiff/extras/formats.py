"""In which formats ports and sweeps are reported."""

from llamadiff.report.formats import Format

OF_PORT = (Format("json", (".json",), "extras.port.page:as_json", plain=True),)
OF_SWEEP = (Format("markdown", (".md", ".markdown"), "extras.sweep.page:sweep_to_markdown", plain=True),)
