"""llamadiff in a project's own tests, by the slice that has it. pytest finds this file by its entry point."""

from __future__ import annotations

from llamadiff import plugins

pytest_plugins = tuple(plugins.ask_all(lambda each: each.pytest_plugin))
