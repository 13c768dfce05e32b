"""Programs that use Accelerate and Lightning."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ports import data
from tests.ports.port import Edit, Port

_FABRIC = str(Path(sys.executable).with_name("fabric"))

ACCELERATE = Port(
    name="accelerate",
    repository="huggingface/accelerate",
    script="examples/by_feature/checkpointing.py",
    data=data.sentences,
    arguments=("--cpu", "--checkpointing_steps", "epoch", "--output_dir", "saved"),
    prepare=(
        Edit("import os\n\nimport evaluate\n", "import os\n\nimport evaluate\nimport probe\n"),
        Edit(
            "            accelerator.backward(loss)\n",
            "            accelerator.backward(loss)\n            probe.step(100 * epoch + step, loss)\n",
        ),
        Edit('"batch_size": 16}', '"batch_size": 4}'),
        Edit('"lr": 2e-5', '"lr": 1e-3'),
        Edit("num_warmup_steps=100", "num_warmup_steps=2"),
    ),
    changes=(
        Edit("import os\n\nimport evaluate\n", "import os\nimport tempfile\n\nimport drivetrain\nimport evaluate\n"),
        # Each rank's files make up the checkpoint.
        Edit(
            '            output_dir = f"epoch_{epoch}"\n'
            "            if args.output_dir is not None:\n"
            "                output_dir = os.path.join(args.output_dir, output_dir)\n"
            "            accelerator.save_state(output_dir)\n",
            "            with tempfile.TemporaryDirectory() as directory:\n"
            '                output_dir = os.path.join(directory, f"epoch_{epoch}")\n'
            "                accelerator.save_state(output_dir)\n"
            "                order = train_dataloader.synchronized_generator.get_state()\n"
            '                accelerator.save(order, os.path.join(output_dir, "order.pt"))\n'
            '                drivetrain.report({"epoch": epoch}, drivetrain.Checkpoint.from_directory(directory))\n',
        ),
        Edit(
            "            path = os.path.basename(args.resume_from_checkpoint)\n",
            '            order = torch.load(os.path.join(args.resume_from_checkpoint, "order.pt"))\n'
            "            train_dataloader.synchronized_generator.set_state(order)\n"
            "            path = os.path.basename(args.resume_from_checkpoint)\n",
        ),
        Edit(
            "    args = parser.parse_args()\n",
            "    args = parser.parse_args()\n"
            "    if checkpoint := drivetrain.get_checkpoint():\n"
            "        directory = checkpoint.to_directory()\n"
            "        args.resume_from_checkpoint = os.path.join(directory, *os.listdir(directory))\n",
        ),
    ),
    kill="1:202",
)

FABRIC = Port(
    name="fabric",
    repository="Lightning-AI/pytorch-lightning",
    script="examples/fabric/language_model/train.py",
    data=data.words,
    launcher=(_FABRIC, "run", "--accelerator=cpu", "--strategy=ddp", "--devices=2"),
    environment={"LT_CLI_USED": "1"},
    prepare=(
        Edit("import torch\n", "import probe\nimport torch\n"),
        Edit("vocab_size=dataset.vocab_size)", "vocab_size=dataset.vocab_size, ninp=16, nhid=16)"),
        Edit("n - 4000, 2000, 2000", "n - 40, 20, 20"),
        Edit("max_epochs=20", "max_epochs=4"),
        Edit(
            "        fabric.backward(loss)\n",
            "        fabric.backward(loss)\n        probe.step(100 * epoch + batch_idx, loss)\n",
        ),
    ),
    changes=(
        Edit("import torch\n", "import os\nimport drivetrain\nimport tempfile\nimport torch\n"),
        Edit(
            "    for epoch in range(max_epochs):\n",
            "    first = 0\n"
            '    state = {"model": model, "optimizer": optimizer}\n'
            '    random = f"random{fabric.global_rank}.pt"\n'
            "    if checkpoint := drivetrain.get_checkpoint():\n"
            "        directory = checkpoint.to_directory()\n"
            '        first = fabric.load(os.path.join(directory, "state.pt"), state)["epoch"] + 1\n'
            "        for _ in range(first):\n"
            "            next(iter(train_dataloader))  # the loader counts the epochs\n"
            "        torch.set_rng_state(torch.load(os.path.join(directory, random)))\n"
            "    for epoch in range(first, max_epochs):\n",
        ),
        Edit(
            '        fabric.print(f"val loss {val_loss.item():.4f}")\n',
            '        fabric.print(f"val loss {val_loss.item():.4f}")\n'
            "        with tempfile.TemporaryDirectory() as directory:\n"
            '            fabric.save(os.path.join(directory, "state.pt"), {**state, "epoch": epoch})\n'
            "            torch.save(torch.get_rng_state(), os.path.join(directory, random))\n"
            '            drivetrain.report({"loss": val_loss}, drivetrain.Checkpoint.from_directory(directory))\n',
        ),
    ),
    kill="1:202",
)

LIGHTNING = Port(
    name="lightning",
    repository="Lightning-AI/pytorch-lightning",
    script="examples/pytorch/basics/transformer.py",
    data=data.words,
    options=("--backend", "torch"),
    prepare=(
        Edit("import torch\n", "import probe\nimport torch\n"),
        Edit(
            "vocab_size=vocab_size)\n\n    def training_step",
            "vocab_size=vocab_size, ninp=16, nhid=16)\n\n    def training_step",
        ),
        Edit("n - 4000, 2000, 2000", "n - 40, 20, 20"),
        Edit(
            "L.Trainer(gradient_clip_val=0.25, max_epochs=20)",
            'L.Trainer(gradient_clip_val=0.25, max_epochs=4, accelerator="cpu", strategy="ddp", devices=2)',
        ),
        Edit(
            '        self.log("train_loss", loss, prog_bar=True)\n',
            "        probe.step(100 * self.current_epoch + batch_idx, loss)\n"
            '        self.log("train_loss", loss, prog_bar=True)\n',
        ),
    ),
    changes=(
        Edit("import torch\n", "import drivetrain\nimport os\nimport torch\n"),
        Edit(
            "from lightning.pytorch.demos import",
            "from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback\n"
            "from drivetrain_lightning import prepare_trainer\n"
            "from lightning.pytorch.demos import",
        ),
        Edit(
            'accelerator="cpu", strategy="ddp", devices=2)',
            "strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()],\n"
            "                        callbacks=[RayTrainReportCallback()], enable_checkpointing=False)\n"
            "    trainer = prepare_trainer(trainer)\n"
            "    path = None\n"
            "    if checkpoint := drivetrain.get_checkpoint():\n"
            "        path = os.path.join(checkpoint.to_directory(), RayTrainReportCallback.CHECKPOINT_NAME)",
        ),
        Edit(
            "trainer.fit(model, train_dataloader, val_dataloader)",
            "trainer.fit(model, train_dataloader, val_dataloader, ckpt_path=path)",
        ),
    ),
    kill="1:202",
)

PORTS = (ACCELERATE, FABRIC, LIGHTNING)
