"""Programs that use PyTorch alone."""

from __future__ import annotations

from tests.ports import data
from tests.ports.port import PYTHON, Edit, Port

NANOGPT = Port(
    name="nanogpt",
    repository="karpathy/nanoGPT",
    script="train.py",
    data=data.tokens,
    arguments=(
        "--dataset=synthetic",
        "--device=cpu",
        "--backend=gloo",
        "--dtype=float32",
        "--compile=False",
        "--eval_iters=2",
        "--eval_interval=4",
        "--max_iters=12",
        "--warmup_iters=4",
        "--lr_decay_iters=12",
        "--gradient_accumulation_steps=4",
        "--batch_size=2",
        "--block_size=16",
        "--n_layer=1",
        "--n_head=2",
        "--n_embd=16",
        "--dropout=0.2",
    ),
    prepare=(
        Edit("import pickle\n", "import pickle\nimport probe\n"),
        Edit("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
        Edit("    torch.cuda.set_device(device)\n", ""),
        Edit("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        Edit("    iter_num += 1\n", "    probe.step(iter_num, loss)\n    iter_num += 1\n"),
    ),
    changes=(
        Edit("import pickle\n", "import drivetrain\nimport pickle\n"),
        # Each rank writes its own part of the checkpoint: rank 0 the model, all ranks their batch and random state.
        Edit(
            "if master_process:\n    os.makedirs(out_dir, exist_ok=True)\n",
            "resumed = drivetrain.get_checkpoint()\n"
            "if resumed:\n"
            "    init_from = 'resume'\n"
            "out_dir = os.path.join(out_dir, str(ddp_rank))\n"
            "os.makedirs(out_dir, exist_ok=True)\n",
        ),
        Edit("    ckpt_path = os.path.join(out_dir, ", "    ckpt_path = os.path.join(resumed.to_directory(), "),
        Edit(
            "t0 = time.time()\nlocal_iter_num",
            "if resumed:\n"
            "    own = torch.load(os.path.join(resumed.to_directory(), f'rank{ddp_rank}.pt'))\n"
            "    X, Y = own['batch']\n"
            "    torch.set_rng_state(own['random'])\n"
            "t0 = time.time()\nlocal_iter_num",
        ),
        Edit(
            "    # evaluate the loss on train/val sets",
            "    own = {'batch': (X, Y), 'random': torch.get_rng_state()}\n    # evaluate the loss on train/val sets",
        ),
        Edit(
            "    if iter_num == 0 and eval_only:",
            "    if iter_num % eval_interval == 0 and iter_num > 0:\n"
            "        torch.save(own, os.path.join(out_dir, f'rank{ddp_rank}.pt'))\n"
            "        drivetrain.report({'iter': iter_num}, drivetrain.Checkpoint.from_directory(out_dir))\n"
            "    if iter_num == 0 and eval_only:",
        ),
    ),
    kill="1:10",
)

SNAPSHOTS = Port(
    name="ddp-tutorial",
    repository="pytorch/examples",
    script="distributed/ddp-tutorial-series/multigpu_torchrun.py",
    arguments=("6", "1"),
    prepare=(
        Edit("import os\n\n\ndef", "import os\nimport probe\n\n\ndef"),
        Edit('    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', "    torch.manual_seed(0)\n"),
        Edit('backend="nccl"', 'backend="gloo"'),
        Edit("model.to(self.gpu_id)", "model"),
        Edit("source = source.to(self.gpu_id)", "pass"),
        Edit("targets = targets.to(self.gpu_id)", "pass"),
        Edit('loc = f"cuda:{self.gpu_id}"', 'loc = "cpu"'),
        Edit("device_ids=[self.gpu_id]", ""),
        Edit("pin_memory=True", "pin_memory=False"),
        # The cross entropy of one output is always 0.
        Edit("F.cross_entropy(", "F.mse_loss("),
        Edit("        self.optimizer.step()\n", "        self.optimizer.step()\n        self.loss = loss\n"),
        Edit(
            "            if self.gpu_id == 0 and",
            "            probe.step(epoch, self.loss)\n            if self.gpu_id == 0 and",
        ),
    ),
    changes=(
        Edit("import os\nimport probe\n", "import drivetrain\nimport os\nimport probe\nimport tempfile\n"),
        Edit(
            "        if os.path.exists(snapshot_path):\n",
            "        if checkpoint := drivetrain.get_checkpoint():\n"
            "            snapshot_path = os.path.join(checkpoint.to_directory(), snapshot_path)\n",
        ),
        # The tutorial stores the epoch that it has just completed, and repeats it.
        Edit('"EPOCHS_RUN": epoch,', '"EPOCHS_RUN": epoch + 1,'),
        Edit(
            "        torch.save(snapshot, self.snapshot_path)\n",
            "        with tempfile.TemporaryDirectory() as directory:\n"
            '            torch.save(snapshot, os.path.join(directory, "snapshot.pt"))\n'
            '            drivetrain.report({"epoch": epoch}, drivetrain.Checkpoint.from_directory(directory))\n',
        ),
    ),
    kill="1:4",
)

FSDP2 = Port(
    name="fsdp2",
    repository="pytorch/examples",
    script="distributed/FSDP2/example.py",
    prepare=(
        Edit("import os\n", "import os\nimport probe\n"),
        Edit("has_gpu and gpu_count >= min_gpus", "True"),
        Edit("backend=backend, device_id=device", "backend=backend"),
        Edit("n_layers=10", "n_layers=2"),
        Edit("batch_size = 32", "batch_size = 2"),
        # The script does not initialize the layers.
        Edit(
            "        model.reset_parameters()\n",
            "        for module in model.modules():\n"
            "            if hasattr(module, 'reset_parameters'):\n"
            "                module.reset_parameters()\n",
        ),
        Edit("for _ in range(10):", "for step in range(10):"),
        Edit("        optim.zero_grad()\n", "        optim.zero_grad()\n        probe.step(step, loss)\n"),
    ),
    changes=(
        Edit("from checkpoint import Checkpointer\n", "from drivetrain_torch import TrainState\n"),
        Edit(
            '    checkpointer = Checkpointer("checkpoints", dcp_api=args.dcp_api)\n'
            "    if checkpointer.last_training_time is None:\n"
            "        model.to_empty(device=device)\n"
            "        for module in model.modules():\n"
            "            if hasattr(module, 'reset_parameters'):\n"
            "                module.reset_parameters()\n"
            "    else:\n        checkpointer.load_model(model)\n    \n",
            "    model.to_empty(device=device)\n"
            "    for module in model.modules():\n"
            "        if hasattr(module, 'reset_parameters'):\n"
            "            module.reset_parameters()\n",
        ),
        Edit(
            "    if checkpointer.last_training_time is not None:\n        checkpointer.load_optim(model, optim)\n",
            "    state = TrainState(model, optim)\n",
        ),
        Edit("for step in range(10):", "for step in range(state.steps, 10):"),
        Edit(
            "    checkpointer.save(model, optim)\n",
            "        state.step()\n        state.save({'step': step})\n",
        ),
    ),
    kill="1:6",
)

IMAGENET = Port(
    name="imagenet",
    repository="pytorch/examples",
    script="imagenet/main.py",
    data=data.images,
    arguments=(
        *("--dist-url", "env://", "--dist-backend", "gloo", "--no-accel", "-j", "0"),
        *("--epochs", "4", "-b", "4", "--lr", "0.01", "--seed", "1", "--arch", "small", "."),
    ),
    prepare=(
        Edit("import random\n", "import probe\nimport random\n"),
        # On a CPU, the script does not connect the models of the ranks.
        Edit(
            "        print('using CPU, this will be slow')\n",
            "        model = torch.nn.parallel.DistributedDataParallel(model)\n",
        ),
        Edit(
            "        losses.update(loss.item(), images.size(0))\n        top1",
            "        probe.step(100 * epoch + i, loss)\n"
            "        losses.update(loss.item(), images.size(0))\n        top1",
        ),
    ),
    changes=(
        Edit("import random\n", "import drivetrain\nimport random\n"),
        Edit("import shutil\n", "import shutil\nimport tempfile\n"),
        Edit(
            "    # optionally resume from a checkpoint\n",
            "    if checkpoint := drivetrain.get_checkpoint():\n"
            "        args.resume = os.path.join(checkpoint.to_directory(), 'checkpoint.pth.tar')\n",
        ),
        Edit(
            "    torch.save(state, filename)\n",
            "    if dist.get_rank() > 0:\n"
            "        return\n"
            "    with tempfile.TemporaryDirectory() as directory:\n"
            "        torch.save(state, os.path.join(directory, filename))\n"
            "        checkpoint = drivetrain.Checkpoint.from_directory(directory)\n"
            "        drivetrain.report({'acc1': state['best_acc1']}, checkpoint)\n"
            "    torch.save(state, filename)\n",
        ),
    ),
    kill="1:203",
)

MNIST = Port(
    name="mnist",
    repository="pytorch/examples",
    script="mnist/main.py",
    data=data.images,
    launcher=PYTHON,
    arguments=("--epochs", "4", "--batch-size", "8", "--no-accel"),
    options=("--backend", "torch"),
    workers=1,
    resume_workers=2,
    prepare=(
        Edit("import argparse\n", "import argparse\nimport probe\n"),
        Edit(
            "        if batch_idx % args.log_interval == 0:",
            "        probe.step(100 * epoch + batch_idx, loss)\n        if batch_idx % args.log_interval == 0:",
        ),
    ),
    changes=(
        Edit(
            "from torch.optim.lr_scheduler import StepLR\n",
            "from torch.optim.lr_scheduler import StepLR\n"
            "from drivetrain_torch import TrainState, prepare_data_loader, prepare_model\n",
        ),
        Edit(
            "DataLoader(dataset1,**train_kwargs)",
            "DataLoader(dataset1,**train_kwargs)\n    train_loader = prepare_data_loader(train_loader)",
        ),
        Edit("Net().to(device)", "prepare_model(Net())"),
        Edit(
            "    for epoch in range(1, args.epochs + 1):\n",
            "    state = TrainState(model, optimizer, scheduler, loader=train_loader)\n"
            "    for epoch in state.epochs(args.epochs):\n"
            "        epoch += 1\n",
        ),
        Edit("        scheduler.step()\n", "        scheduler.step()\n        state.save({'epoch': epoch})\n"),
    ),
    kill="1:301",
)

WORDS = Port(
    name="word-language-model",
    repository="pytorch/examples",
    script="word_language_model/main.py",
    data=data.words,
    launcher=PYTHON,
    arguments=(
        *("--data", "data", "--emsize", "8", "--nhid", "8", "--nlayers", "2", "--batch_size", "4", "--bptt", "10"),
        *("--epochs", "4", "--dropout", "0.3", "--lr", "5"),
    ),
    workers=1,
    prepare=(
        Edit("import argparse\n", "import argparse\nimport probe\n"),
        Edit(
            "        total_loss += loss.item()\n",
            "        probe.step(100 * epoch + batch, loss)\n        total_loss += loss.item()\n",
        ),
    ),
    changes=(
        Edit("import argparse\n", "import argparse\nimport drivetrain\nimport tempfile\n"),
        Edit(
            "best_val_loss = None\n",
            "best_val_loss = None\n"
            "first = 1\n"
            "if checkpoint := drivetrain.get_checkpoint():\n"
            "    state = torch.load(os.path.join(checkpoint.to_directory(), 'state.pt'))\n"
            "    model.load_state_dict(state['model'])\n"
            "    first, lr, best_val_loss = state['first'], state['lr'], state['best']\n"
            "    torch.set_rng_state(state['random'])\n",
        ),
        Edit("range(1, args.epochs+1)", "range(first, args.epochs+1)"),
        Edit(
            "            lr /= 4.0\n",
            "            lr /= 4.0\n"
            "        state = {'model': model.state_dict(), 'first': epoch + 1, 'lr': lr, 'best': best_val_loss,\n"
            "                 'random': torch.get_rng_state()}\n"
            "        with tempfile.TemporaryDirectory() as directory:\n"
            "            torch.save(state, os.path.join(directory, 'state.pt'))\n"
            "            drivetrain.report({'loss': val_loss}, drivetrain.Checkpoint.from_directory(directory))\n",
        ),
    ),
    kill="0:303",
)

PORTS = (NANOGPT, SNAPSHOTS, FSDP2, IMAGENET, MNIST, WORDS)
