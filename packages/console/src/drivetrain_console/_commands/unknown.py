"""The error of ``drivetrain run`` about arguments that it does not know."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

__all__ = ["explain_unknown"]

_OF_LAUNCHERS = {
    "nproc_per_node": "use --num-workers with the total number of workers",
    "num_processes": "use --num-workers",
    "nnodes": "use --num-workers with the total number of workers, and --runtime ray or --runtime command",
    "max_restarts": "use --max-failures",
    "local_ranks_filter": "use --output-of",
    **dict.fromkeys(("log_dir", "redirects", "tee"), "remove it, because the output is always in logs/ of the run"),
    **dict.fromkeys(
        (
            *("node_rank", "master_addr", "master_port", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
            *("rdzv_conf", "run_path", "start_method", "monitor_interval", "local_addr"),
        ),
        "remove it, because drivetrain connects the workers",
    ),
}
"""The remedy for each option of torchrun and similar launchers, by the name with underscores."""


def explain_unknown(given: Sequence[str], unknown: Sequence[str], known: Sequence[str], target: str) -> str:
    """Return a message about unknown arguments, with a remedy for each.

    Args:
        given: the arguments of ``drivetrain run`` before ``--``.
        unknown: the unknown ones among them.
        known: the options of ``drivetrain run``, such as ``--num-workers``.
        target: the target.
    """
    hints, of_script, takes_value = [], [], False
    for word in unknown:
        if not word.startswith("-"):
            if not takes_value:
                of_script.append(word)
            continue
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        option = f"--{name.replace('_', '-')}"
        takes_value = True
        if option in known:
            hints.append(f"{word.partition('=')[0]}: write {option}")
        elif name in _OF_LAUNCHERS:
            hints.append(f"{word.partition('=')[0]}: {_OF_LAUNCHERS[name]}")
        else:
            of_script.append(word)
            takes_value = False
    if of_script:
        hints.append(_about_target(given, unknown, of_script, target, is_complete=len(hints) == 0))
    return f"run: expected options of drivetrain run, got {shlex.join(unknown)}. {'. '.join(hints)}"


def _about_target(
    given: Sequence[str], unknown: Sequence[str], of_script: Sequence[str], target: str, *, is_complete: bool
) -> str:
    """Return where the arguments of a script or the config of a train function belong."""
    if ":" in target:
        return "Pass the config of a train function as --config NAME=VALUE"
    hint = "Pass the arguments of a script after --"
    if not is_complete or target in of_script or not (target.endswith(".py") or "-m" in given):
        return hint
    left = list(unknown)
    kept = [word for word in given if not (left and word == left[0] and left.pop(0))]
    return f"{hint}: drivetrain run {shlex.join(kept[1:])} -- {shlex.join(of_script)}"
