"""Names for programs that start worker groups themselves, or watch a running driver."""

from drivetrain._base.lazy import publish
from drivetrain._base.notebook import as_table
from drivetrain._driver.control import ask
from drivetrain._driver.controller import group_spec
from drivetrain._driver.launch import require_process_state, resolve_runtime
from drivetrain._driver.overrides import OVERRIDES
from drivetrain._driver.policies import RetryBudget
from drivetrain._runtimes.ahead import explain_imports, run_script, start_warm_server
from drivetrain._storage.timeline import add_note

__all__ = [
    "OVERRIDES",
    "RetryBudget",
    "add_note",
    "as_table",
    "ask",
    "explain_imports",
    "group_spec",
    "require_process_state",
    "resolve_runtime",
    "run_script",
    "start_warm_server",
]

publish(__name__)
