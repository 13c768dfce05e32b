"""`drivetrain[testing]` in an empty environment: a plugin is generated, and passes the kit of its hook."""

import subprocess
import sys
import tempfile
from pathlib import Path

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_generated_plugin_passes_its_kit(directory: str) -> None:
    command = [Path(sys.executable).with_name("drivetrain"), "new-plugin", "policy", "mine"]
    subprocess.run([*command, "--directory", directory], check=True, stdout=subprocess.PIPE)
    plugin = Path(directory, "drivetrain-mine")
    for file in ("src/drivetrain_mine/py.typed", ".github/workflows/test.yml", ".gitignore"):
        assert (plugin / file).is_file(), file
    words = ["pip", "install", "--quiet", "--no-deps", str(plugin)]
    subprocess.run([sys.executable, "-m", *words], check=True)
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=plugin, check=True)


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    assert "pytest" not in loaded_modules("import drivetrain_testing")
    with tempfile.TemporaryDirectory() as directory:
        check_generated_plugin_passes_its_kit(directory)
    print("ok: drivetrain[testing]")
