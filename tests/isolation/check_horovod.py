"""`drivetrain[horovod]` in an empty environment: declared and listed without Horovod, which a run says how to build."""

import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_plugin_is_listed_without_being_imported() -> None:
    from drivetrain._hooks.plugins import list_plugins

    assert [plugin.target for plugin in list_plugins("backend")] == ["drivetrain_horovod:HorovodConfig"]
    listing = "from drivetrain._hooks.plugins import list_plugins; list_plugins('backend')"
    assert "drivetrain_horovod" not in loaded_modules(listing)


def check_run_says_how_to_build_horovod(storage_path: str) -> None:
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
        said = str(error)
    else:
        said = ""
    assert "got none on rank 0" in said, said
    assert "python -m drivetrain_horovod.build" in said, said


def check_build_says_what_it_wants() -> None:
    from drivetrain_horovod.build import main

    try:
        main([])
    except SystemExit as error:
        said = str(error)
    else:
        said = ""
    assert "pip install torch" in said, said


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_plugin_is_listed_without_being_imported()
    with tempfile.TemporaryDirectory() as directory:
        check_run_says_how_to_build_horovod(directory)
    check_build_says_what_it_wants()
    print("ok: drivetrain[horovod]")
