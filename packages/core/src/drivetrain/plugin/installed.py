"""The installed plugins: which there are, what is wrong with them, and how to install what is missing."""

from drivetrain._base.lazy import publish
from drivetrain._plugins.known import CORE, OWN, PROVIDERS
from drivetrain._plugins.loading import (
    KINDS,
    Plugin,
    check_plugin,
    check_plugins,
    create_plugin,
    find_damaged_distributions,
    find_unknown_groups,
    install_commands,
    list_plugins,
    missing_runtimes,
)
from drivetrain.loggers.versions import installed_versions

__all__ = [
    "CORE",
    "KINDS",
    "OWN",
    "PROVIDERS",
    "Plugin",
    "check_plugin",
    "check_plugins",
    "create_plugin",
    "find_damaged_distributions",
    "find_unknown_groups",
    "install_commands",
    "installed_versions",
    "list_plugins",
    "missing_runtimes",
]

publish(__name__)
