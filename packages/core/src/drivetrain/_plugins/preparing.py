"""``prepare``: finds the plugin that makes an object of a framework distributed, by the classes of the object."""

from __future__ import annotations

from typing import Any, overload

from drivetrain._plugins.loading import install_commands, installed_plugins, load_plugin
from drivetrain.errors import ConfigurationError

__all__ = ["prepare"]


@overload
def prepare(one: Any, /) -> Any: ...
@overload
def prepare(first: Any, second: Any, /, *more: Any) -> tuple[Any, ...]: ...
def prepare(*objects: Any) -> Any:
    """In a train function, make objects of a framework work on several workers.

    The installed plugins define what this means for which classes:

    - a PyTorch model is moved to the worker's device and wrapped by ``DistributedDataParallel``; a ``DataLoader`` loads
      this worker's part of the data; an optimizer follows its parameters to the device; see
      :func:`drivetrain_torch.prepare_model` and :func:`drivetrain_torch.prepare_data_loader`, which have options;
    - the ``Trainer`` of Lightning or Transformers is checked and configured for this run;
    - a ``tf.data.Dataset`` is marked as this worker's part of the data.

    A plugin registers a function under the name of the framework's root module in the entry-point group
    ``drivetrain.prepare``. For each object, the classes of its type's method resolution order are tried, and the first
    function that does not return ``NotImplemented`` prepares the object.

    Objects are prepared one after another. Pass a model before its optimizer, so that the state of the optimizer can
    follow the parameters to the device. A strategy that shards a model replaces its parameters: call
    ``prepare_model(model, parallel_strategy="fsdp2")`` first, and create the optimizer from the model that it returns.

    Args:
        *objects: the objects. Objects that are already prepared are returned unchanged.

    Returns:
        The prepared object, or a tuple with the prepared objects in the same order.

    Raises:
        ConfigurationError: no installed plugin prepares objects of this class, or the object cannot be used.
        PluginError: the plugin cannot be loaded.
        SessionError: called outside a train function.

    Example:
        In a train function::

            model, loader, optimizer = drivetrain.prepare(model, loader, optimizer)
    """
    prepared = tuple(_prepare(each) for each in objects)
    return prepared[0] if len(objects) == 1 else prepared


def _prepare(value: Any) -> Any:
    installed = {plugin.name for plugin in installed_plugins("prepare")}
    roots = dict.fromkeys(kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    for root in roots:
        if root in installed:
            prepared = load_plugin("prepare", root)(value)
            if prepared is not NotImplemented:
                return prepared
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    commands = install_commands(*roots)
    remedy = f"Run: {commands[0]}" if commands else "Leave it out, or prepare it with a function of its framework"
    raise ConfigurationError(
        f"[DT-809] prepare(): expected objects of these frameworks: {', '.join(sorted(installed)) or 'none'}, whose "
        f"plugins are installed, got {kind}. {remedy}"
    )
