"""The command fused."""

from __future__ import annotations

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.commands import how_of
from llamadiff.cli.inputs import RunOptions
from llamadiff.cli.options import Chat, FailOn, LlamaCpp, Model, Prompt, Tokens, Tolerance, finish
from llamadiff.cli.reports import Reports, with_reports
from llamadiff.system.collisions import refuse_collisions


def fused(
    model: Model, prompt: Prompt = None, tokens: Tokens = None, chat: Chat = False, llama_cpp: LlamaCpp = None,
    tolerance: Tolerance = None, fail_on: FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Find kernels of several nodes, and judge them.

    Nobody sees what a device runs as one, but where it ends."""
    from llamadiff.ext.fused.compare import judge_kernels
    from llamadiff.report.status_line import progress

    asked = RunOptions(prompt, tokens, chat, 0, llama_cpp)
    refuse_collisions([("the model", model), ("the tolerance file", tolerance), *asked.files], [*reports.output_files])
    with progress() as shown:
        result = judge_kernels(model, asked.run(), how_of(tolerance, reports, progress=shown))
    reports.write(result)
    finish(result.verdict, fail_on)


COMMANDS = (Command(LLAMA_CPP, with_reports(fused), ("llamadiff fused model.gguf Once --llama-cpp device=Vulkan0",)),)
