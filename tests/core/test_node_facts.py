"""Facts about nodes: the models of GPUs, which are imitated here, and versions that differ."""

from pathlib import Path

import pytest

from drivetrain._plugins.node import differing_versions, gpu_driver, gpu_models, names_of_gpus, own_versions
from drivetrain._runtimes import remote
from drivetrain.plugin import WorkerInfo
from drivetrain.plugin.callbacks import Console

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"


def write_gpus(directory: Path, *models: str) -> Path:
    (directory / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc\n"
    )
    for minor, model in enumerate(models):
        gpu = directory / "gpus" / f"0000:{90 - minor:02d}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ: 4\nDevice Minor: \t {minor}\n")
    return directory


def test_models_and_driver_are_read_from_the_files_of_the_driver(tmp_path: Path) -> None:
    nvidia = write_gpus(tmp_path, H100, A100)
    assert list(gpu_models(nvidia)) == [H100, A100]
    assert gpu_driver(nvidia) == "550.54.15"
    assert own_versions(nvidia)["NVIDIA driver"] == "550.54.15"


def test_machine_without_gpus_has_no_models(tmp_path: Path) -> None:
    assert list(gpu_models(tmp_path)) == []
    assert gpu_driver(tmp_path) == ""
    assert "NVIDIA driver" not in own_versions(tmp_path)
    assert {"Python", "drivetrain", "torch"} <= own_versions(tmp_path).keys()


@pytest.mark.parametrize(
    ("gpus", "models", "names"),
    [
        (("1",), [H100, A100], (A100,)),
        (("GPU-8a", "GPU-9b"), [H100] * 4, (H100, H100)),
        (("GPU-8a",), [H100, A100], ()),
        (("7",), [H100, A100], ()),
        (("0",), [], ()),
        ((), [H100], ()),
    ],
)
def test_gpus_have_the_names_of_their_models(gpus: tuple[str, ...], models: list[str], names: tuple[str, ...]) -> None:
    assert names_of_gpus(gpus, models) == names


def test_builds_of_one_version_do_not_differ() -> None:
    first = {"torch": "2.13.0+cu126", "Python": "3.11.7", "jax": "0.4"}
    assert differing_versions(first, {"torch": "2.13.0+cpu", "Python": "3.11.7", "ray": "2"}) == []
    assert sorted(differing_versions(first, {"torch": "2.12.0", "Python": "3.11.9"})) == ["Python", "torch"]


def worker(rank: int, host: str, torch: str) -> WorkerInfo:
    versions = {**own_versions(), "torch": torch}
    return WorkerInfo(
        rank=rank, local_rank=0, node_rank=rank, node_id=host, hostname=host, ip="10.0.0.1", pid=1, versions=versions
    )


def test_nodes_with_other_versions_are_named_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_warned", set())
    own = own_versions()["torch"]
    workers = [worker(0, "node-1", own), worker(1, "node-2", "1.0.0"), worker(2, "node-3", own)]
    for _ in range(2):
        remote._warn_of_versions(workers, Console("digits"))
    expected = (
        f"digits: node-2 has other versions than node-1: torch 1.0.0 instead of {own}. Install the same versions on "
        "all nodes\n"
    )
    assert capsys.readouterr().err == expected
