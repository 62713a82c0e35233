"""`--help` of a command with many options: in groups, each with what it takes and its default."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

__all__ = ["GroupedHelp"]

_WIDTH = 100
_METAVARS = (
    (re.compile(r"<(?:list\[)?int(?: range)?\]?>"), "N"),
    (re.compile(r"<(?:list\[)?float(?: range)?\]?>"), "NUMBER"),
    (re.compile(r"<(?:list\[)?str\]?>"), "TEXT"),
)
# `[default: 8000; 0<=x<=65535]`: what is out of its range is refused with the range.
_EXTRA = re.compile(r"\s*\[(?:default: (?P<default>[^;]*?))?(?:; )?(?:[^\[\];]*x[<>]=?[^\[\];]*)?\]$")
_SWITCH = re.compile(r"--(?P<name>[\w-]+) / --no-(?P=name)\b")
_FIRST = "Options"
# Most asked for first; a group that is not named here comes where its options do.
_ORDER = ("Arguments", _FIRST, "Engine", "Models", "Security", "Load", "Limits of a request")


class GroupedHelp(TyperCommand):
    """Options in the groups that their `rich_help_panel` names; those without come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all groups."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _ORDER}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "option":
                group = getattr(param, "rich_help_panel", None) or _FIRST
                groups.setdefault(group, []).append(_readable(*record))
            else:
                groups["Arguments"].append((record[0].split(" ")[0], record[1]))
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the epilog as it is, not filled."""
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """A context whose help may be wider than 80 columns."""
        return super().make_context(info_name, args, parent, **{"max_content_width": _WIDTH, **extra})


def _readable(names: str, text: str) -> tuple[str, str]:
    for pattern, metavar in _METAVARS:
        names = pattern.sub(metavar, names)
    switch = _SWITCH.search(names)
    if switch:
        names = names.replace(switch[0], f"--[no-]{switch['name']}")
    found = _EXTRA.search(text)
    if found:
        text = text[: found.start()]
        default = found["default"]
        if switch and default is not None:
            default = "no" if default.startswith("no-") else "yes"
        if default is not None:
            text = f"{text} (default: {default.removesuffix('.0')})"
    return names, text
