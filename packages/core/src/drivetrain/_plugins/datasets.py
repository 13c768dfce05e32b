"""Find the installed provider for a dataset, and the runtimes on which it works.

A provider that cannot be imported, or that raises in ``accepts()``, is an error only for a dataset that no other
provider accepts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._base.failure import one_line
from drivetrain._hooks.dataset import DatasetProvider, Shard, SplitRequest
from drivetrain._plugins.loading import Plugin, check_plugin, errors_of, install_commands, installed_plugins
from drivetrain.errors import ConfigurationError, DrivetrainError, PluginBrokenError, PluginError, PluginNotFoundError

__all__ = ["OpenedDataset", "Providers", "check_runtime", "required_runtime"]

_EXTRA = "data"  # the extra of the core that installs the provider for the most common kinds of datasets


@dataclass(frozen=True, slots=True)
class OpenedDataset:
    """A dataset that its provider has opened. :meth:`drivetrain.DataConfig.open` returns an object of this class.

    Attributes:
        provider: the provider that opened the dataset.
        value: the return value of the provider's :meth:`DatasetProvider.open`.
        origin: the name and the distribution of the provider, for error messages.
    """

    provider: DatasetProvider
    value: Any
    origin: str

    def split(self, request: SplitRequest) -> list[Shard]:
        """Split the dataset into one shard per rank.

        Raises:
            PluginBrokenError: the provider raised an exception, or did not return one shard per rank.
        """
        with _named(request.name, self.origin, "split"):
            found: object = self.provider.split(self.value, request)
            shards = list(found) if isinstance(found, Iterable) and not isinstance(found, (Mapping, str)) else None
        if shards is None:
            problem = f"expected a list with one shard per rank, got {found!r:.200}"
        elif len(shards) != request.world_size:
            problem = f"expected {request.world_size} shards, one per rank, got {len(shards)}"
        elif wrong := [shard for shard in shards if not callable(getattr(shard, "iter_batches", None))]:
            problem = f"expected shards with a method iter_batches(), got {wrong[0]!r:.200}"
        else:
            return shards
        raise _broken(request.name, self.origin, "split", problem)


@dataclass(frozen=True, slots=True)
class _Installed:
    plugin: Plugin
    provider: DatasetProvider

    def __str__(self) -> str:
        return f"{self.plugin.name!r} of {self.plugin.distribution} {self.plugin.version}"

    def open(self, name: str, dataset: object, keep_together: str | None) -> OpenedDataset:
        with _named(name, str(self), "open"):
            value = self.provider.open(name, dataset, keep_together=keep_together)
        return OpenedDataset(self.provider, value, str(self))


class Providers:
    """The installed dataset providers. Creating this object imports all of them."""

    def __init__(self) -> None:
        self._installed: list[_Installed] = []
        self._broken: dict[str, PluginError] = {}
        for plugin in installed_plugins("dataset"):
            try:
                self._installed.append(_Installed(plugin, _make(plugin)))
            except PluginError as error:
                self._broken[plugin.target] = error

    def accepting(self, dataset: object) -> list[_Installed]:
        """Return the providers that accept an object."""
        return [installed for installed in self._installed if self._accepts(installed, dataset)]

    def open(self, name: str, dataset: object, *, keep_together: str | None = None) -> OpenedDataset:
        """Open a dataset with the provider that accepts it.

        Raises:
            ConfigurationError: no provider accepts it.
            PluginNotFoundError: no provider accepts it, and a package that may contain a suitable provider is not
                installed.
            PluginError: several providers accept it.
            PluginBrokenError: no provider accepts it, and an installed provider is broken; or the provider raised an
                exception.
        """
        accepting = self.accepting(dataset)
        if not accepting:
            raise self._not_accepted(name, dataset)
        if len(accepting) > 1:
            raise PluginError(
                f"[DT-603] dataset {name!r}: expected one provider that accepts a {type(dataset).__qualname__}, got "
                f"{' and '.join(map(str, accepting))}. Uninstall one of them"
            )
        return accepting[0].open(name, dataset, keep_together)

    def adopt(self, shard: Any) -> Any:
        """Let each provider prepare a shard that a ``DataConfig`` subclass has created."""
        for installed in self._installed:
            shard = installed.provider.adopt(shard)
        return shard

    def default_options(self) -> Any | None:
        """Return the default ``execution_options`` of the first provider that has any, or None."""
        options = (installed.provider.default_options() for installed in self._installed)
        return next((option for option in options if option is not None), None)

    def _accepts(self, installed: _Installed, dataset: object) -> bool:
        cause: BaseException | None = None
        try:
            accepted: object = installed.provider.accepts(dataset)
            if isinstance(accepted, bool):
                return accepted
            problem = f"expected True or False, got {accepted!r:.200}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # another package may raise anything
            cause, problem = error, one_line(error)
        broken = PluginBrokenError(f"[DT-602] the dataset provider {installed} failed in accepts(): {problem}")
        broken.__cause__ = cause
        self._broken[installed.plugin.target] = broken
        return False

    def _not_accepted(self, name: str, dataset: object) -> Exception:
        module, kind = type(dataset).__module__, type(dataset).__qualname__
        described = [f"{installed} ({installed.provider.accepted})" for installed in self._installed]
        message = (
            f"[DT-110] dataset {name!r}: no installed provider accepts an object of type "
            f"{kind if module == 'builtins' else f'{module}.{kind}'}. "
            f"Installed providers: {'; '.join(described) or 'none'}"
        )
        if self._broken:
            broken = list(self._broken.values())
            error: Exception = PluginBrokenError(f"{message}. Broken: {'; '.join(map(str, broken))}")
            error.__cause__ = broken[0]
            return error
        if commands := install_commands(_EXTRA, module.partition(".")[0]):
            return PluginNotFoundError(f"{message}. Run: {' or '.join(commands)}")
        return ConfigurationError(message)


@contextlib.contextmanager
def _named(dataset: str, origin: str, method: str) -> Iterator[None]:
    """Name the dataset, the provider and the method in an exception other than ours."""
    try:
        yield
    except DrivetrainError:
        raise
    except Exception as error:  # another package may raise anything
        raise _broken(dataset, origin, method, one_line(error)) from error


def _broken(dataset: str, origin: str, method: str, problem: str) -> PluginBrokenError:
    return PluginBrokenError(f"[DT-602] dataset {dataset!r}: the provider {origin} failed in {method}(): {problem}")


def required_runtime(datasets: Mapping[str, Any]) -> str | None:
    """Return the runtime to use for datasets if the user selects none; None if every runtime can read the datasets.

    Args:
        datasets: the datasets by name, opened or not. Functions that create datasets are ignored.
    """
    needed = _needed_runtimes(datasets)
    return next((runtimes[0] for runtimes in needed.values()), None)


def check_runtime(datasets: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """Check that the workers of a runtime can read datasets.

    Args:
        datasets: the datasets by name, opened or not. Functions that create datasets are not called.
        runtime: the name of the runtime.

    Returns:
        The same datasets, except that each function that creates a dataset is replaced by a function that also checks
        the created dataset.

    Raises:
        ConfigurationError: the workers cannot read a dataset.
    """
    for name, runtimes in _needed_runtimes(datasets).items():
        if runtime not in runtimes:
            raise ConfigurationError(
                f"[DT-111] dataset {name!r}: expected a runtime whose workers can read a "
                f"{type(datasets[name]).__qualname__} ({', '.join(map(repr, runtimes))}), got {runtime!r}. Use "
                f"ScalingConfig(runtime={runtimes[0]!r})"
            )
    return {
        name: functools.partial(_make_checked, name, dataset, runtime) if callable(dataset) else dataset
        for name, dataset in datasets.items()
    }


def _make_checked(name: str, function: Callable[[], Any], runtime: str) -> Any:
    """Call the function that creates a dataset, and check that the workers can read the dataset."""
    dataset = function()
    check_runtime({name: dataset}, runtime)
    return dataset


def _needed_runtimes(datasets: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return a mapping from each dataset that only some runtimes can read to the names of these runtimes.

    Functions, and datasets that no provider accepts, are skipped.
    """
    given = {name: dataset for name, dataset in datasets.items() if not callable(dataset)}
    providers = {name: [dataset.provider] for name, dataset in given.items() if isinstance(dataset, OpenedDataset)}
    unopened = given.keys() - providers.keys()
    if unopened:
        installed = Providers()
        for name in unopened:
            providers[name] = [accepting.provider for accepting in installed.accepting(given[name])]
    return {
        name: list(provider.runtimes)
        for name in given
        for provider in providers[name][:1]
        if provider.runtimes is not None
    }


def _make(plugin: Plugin) -> DatasetProvider:
    kind = check_plugin(plugin)
    with errors_of(plugin, "cannot be created"):
        provider: DatasetProvider = kind()
    return provider
