from drivetrain import FailureConfig, RunConfig, ScalingConfig
from drivetrain_hf.transformers import RayTrainReportCallback, prepare_trainer
from drivetrain_torch import TorchTrainer
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification
from transformers import Trainer, TrainingArguments


def train():
    images, labels = load_digits(return_X_y=True)
    pairs = zip(images.astype(int).tolist(), labels.tolist(), strict=True)
    rows = [{"input_ids": image, "labels": label} for image, label in pairs]
    config = BertConfig(
        vocab_size=17,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
    )
    arguments = TrainingArguments(
        "model",
        num_train_epochs=2,
        per_device_train_batch_size=64,
        save_strategy="epoch",
        report_to="none",
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()


workers = ScalingConfig(num_workers=8, use_gpu=True)
retries = RunConfig(failure_config=FailureConfig(max_failures=3))
result = TorchTrainer(train, scaling_config=workers, run_config=retries).fit()
print(result.metrics, result.checkpoint)
