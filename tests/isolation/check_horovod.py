"""`drivetrain[horovod]` in an empty environment: it is listed without Horovod, and a run reports how to build it."""

import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_plugin_is_listed_without_being_imported() -> None:
    from drivetrain._plugins.loading import list_plugins

    assert [plugin.target for plugin in list_plugins("backend")] == ["drivetrain_horovod:HorovodConfig"]
    listing = "from drivetrain._plugins.loading import list_plugins; list_plugins('backend')"
    assert "drivetrain_horovod" not in loaded_modules(listing)


def check_run_reports_how_to_build_horovod(storage_path: str) -> None:
    from drivetrain import PluginError, RunConfig, ScalingConfig
    from drivetrain_horovod import HorovodTrainer

    trainer = HorovodTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage_path, verbose=0),
    )
    try:
        trainer.fit()
    except PluginError as error:
        message = str(error)
    else:
        message = "no error"
    assert "got none on rank 0" in message, message
    assert "python -m drivetrain_horovod.build" in message, message


def check_build_reports_what_to_install() -> None:
    from drivetrain_horovod.build import main

    try:
        main([])
    except SystemExit as error:
        message = str(error)
    else:
        message = "no error"
    assert "pip install torch" in message, message


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_plugin_is_listed_without_being_imported()
    with tempfile.TemporaryDirectory() as directory:
        check_run_reports_how_to_build_horovod(directory)
    check_build_reports_what_to_install()
    print("ok: drivetrain[horovod]")
