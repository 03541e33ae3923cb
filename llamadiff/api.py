"""What a slice may use of the core: these modules, what they name without an underscore. All else may change unsaid."""

from __future__ import annotations

# folder: what is there for slices, and the modules
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "candidates": (
        "Where the other trace comes from: kinds of candidates, and how named tensors become a trace.",
        ("arrays", "command", "dump", "gguf_file", "map_file", "name_map", "opening", "pieces", "reference", "source"),
    ),
    "cli": (
        "Commands and their options.",
        ("command", "commands", "inputs", "options", "reports"),
    ),
    "engines": (
        "A model file, what computes the right values, what is run and how.",
        ("capture_request", "model_file", "own_graph", "reference_model", "run_spec", "select", "treatments"),
    ),
    "judge": (
        "Passes of the engine over traces, findings, verdicts, and the loop that learns how an engine computes.",
        ("allowance", "compared", "coverage", "fact", "finding", "fit", "lanes", "measurement", "measuring",
         "preflight.checks", "replay", "run", "settings", "sketching", "study", "verdict"),
    ),
    "llamacpp": (
        "llama.cpp's process: what it is asked, what it tells, who reads that.",
        ("blocks", "capture", "child", "dequantize", "doctor", "installed", "interface", "layout", "library",
         "observer", "passes", "probes", "quantizing", "readers", "request", "sent_tensor", "session", "settings_words",
         "shipped", "steps", "tap_names", "tensor_transport", "tensors"),
    ),
    "numerics": (
        "Roundings, policies, metrics.",
        ("angles", "arithmetic", "cpu", "eight_bits", "halves", "metrics", "pictures", "policies", "rounding",
         "rounding_tap", "summing", "tolerances", "types"),
    ),
    "report": (
        "What formats have in common.",
        ("check_lines", "facts", "formats", "github", "json", "status_line", "tables", "terminal.columns",
         "terminal.escape", "terminal.page", "terminal.report", "terminal.tap_lines"),
    ),
    "result": (
        "What was found, as data.",
        ("comparison", "conventions", "diagnosis", "logits", "message", "normal", "oddity", "rows"),
    ),
    "system": (
        "Files, processes, errors.",
        ("collisions", "commands", "errors", "exits", "input", "libraries", "output", "pages", "progress",
         "python_child", "stale_files", "started", "stops", "supervised"),
    ),
    "trace": (
        "The trace file and the names of taps.",
        ("hashing", "last_row", "metadata", "reader", "stated", "taps", "token_text", "writer"),
    ),
    "verbs": (
        "From a model and a run to a result.",
        ("by_original", "check_traces", "judging", "verbs", "workers"),
    ),
    "words": (
        "What is said of a result.",
        ("advice", "blame", "diagnosis_text", "provenance", "repairs", "unjudged"),
    ),
}  # fmt: skip
