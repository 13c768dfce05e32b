"""Objects that have stored the processes of the driver are refused before the start, wherever they are used.

Otherwise, each rank would train alone without a message. Models, optimizers and datasets can be created before `fit()`.
"""

# arguments: local
# campaign: inprocess; ray

import functools
import sys
import tempfile

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler
from transformers import TrainingArguments

import drivetrain
from drivetrain import ConfigurationError, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer

RUNTIME = sys.argv[1] if len(sys.argv) > 1 else "local"
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
accelerator = Accelerator(cpu=True)
prepared = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
fabric = Fabric(accelerator="cpu")
trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
arguments = TrainingArguments(tempfile.mkdtemp(), report_to="none", use_cpu=True)
assert arguments.world_size == 1
loader = DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=1, rank=0))


class Recipe:
    tool = fabric

    def __init__(self):
        self.parts = {"tools": [accelerator]}

    def fit(self, config):
        print(self.parts)

    def __call__(self, config):
        print(self.parts)

    @classmethod
    def create(cls, config):
        print(cls.tool)


recipe = Recipe()


def nothing(config):
    pass


def two(tool, config):
    pass


def uses_global(config):
    accelerator.prepare(model)


def helper():
    return fabric


def uses_helper(config):
    helper()


def uses_object(config):
    print(recipe.parts)


def uses_trainer(config):
    trainer.fit(model)


def uses_arguments(config):
    print(arguments.world_size)


def uses_loader(config):
    print(loader)


def closure(tool):
    return lambda config: print(tool)


@functools.wraps(uses_global)
def decorated(config):
    return uses_global(config)


def allowed(config):
    config["optimizer"].step()
    drivetrain.report({"weight": model.weight.item(), "own": optimizer.defaults["lr"]})


REFUSED = {
    "a global": (uses_global, {}),
    "a global of a helper": (uses_helper, {}),
    "in a global object": (uses_object, {}),
    "a Lightning trainer": (uses_trainer, {}),
    "training arguments whose world size was read": (uses_arguments, {}),
    "a loader with a distributed sampler": (uses_loader, {}),
    "in a closure": (closure(accelerator), {}),
    "in the config": (nothing, {"tool": accelerator}),
    "deep in the config": (nothing, {"tools": [{"first": (fabric,)}]}),
    "prepared by Accelerate": (nothing, {"optimizer": prepared}),
    "prepared by Fabric": (nothing, {"loader": fabric.setup_dataloaders(DataLoader(range(4)))}),
    "in a partial": (functools.partial(two, accelerator), {}),
    "of a bound method": (recipe.fit, {}),
    "of a class method": (Recipe.create, {}),
    "of a callable object": (recipe, {}),
    "behind a decorator": (decorated, {}),
}


def fit(function, config):
    workers = {"num_workers": 0} if RUNTIME == "inprocess" else {"num_workers": 2, "runtime": RUNTIME}
    return TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(**workers),
        run_config=RunConfig(verbose=0, worker_output="none"),
    ).fit()


if __name__ == "__main__":
    problems = []
    for case, (function, config) in REFUSED.items():
        try:
            fit(function, config)
        except ConfigurationError as error:
            if error.code != "DT-130":
                problems.append(f"{case}: {error}")
        else:
            problems.append(f"{case}: not refused")
    if "weight" not in fit(allowed, {"optimizer": optimizer}).metrics:
        problems.append("objects that do not depend on the processes: expected a report")
    print("\n".join(problems) or "OK")
    sys.exit(bool(problems))
