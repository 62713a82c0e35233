"""`octavo plan`."""

from __future__ import annotations

import msgspec
import typer

from octavo.cli.console import loading_progress
from octavo.config import EngineConfig

__all__ = ["plan_command"]


def plan_command(config: EngineConfig, as_json: bool) -> None:
    """Show what memory a model would take; its files' headers are read, its weights are not.

    Raises:
        OctavoError: no such model, or one that does not fit.
    """
    from octavo.engine.loop_builder import find_model
    from octavo.runner.runner_builder import plan_model

    with loading_progress() as progress:
        source = find_model(config, progress)
    plan = plan_model(config, source)
    if not as_json:
        typer.echo(plan.render())
        return
    fields = msgspec.to_builtins(plan)
    fields["kv_bytes"] = plan.kv_bytes
    fields["kv_tokens"] = (plan.num_blocks - 1) * plan.block_size
    fields["total_bytes"] = plan.total_bytes
    typer.echo(msgspec.json.encode(fields).decode())
