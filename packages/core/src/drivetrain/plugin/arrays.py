"""Training states that consist of named arrays, which NumPy reads."""

from drivetrain._base.lazy import publish
from drivetrain._worker.arrayfiles import StoredArray
from drivetrain._worker.arraystate import ArrayEntry, ArrayFiles
from drivetrain._worker.jsonvalues import from_json, to_json

__all__ = ["ArrayEntry", "ArrayFiles", "StoredArray", "from_json", "to_json"]

publish(__name__)
