"""Opens files: finds them, determines their formats, and unifies their columns before anything is read from them."""

from __future__ import annotations

import collections
import glob
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from drivetrain import ConfigurationError
from drivetrain_data._conversion import check_names

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["OpenedFiles", "inspect_fragments", "open_files"]

_METADATA_THREADS = 16
_JSON_BLOCK_BYTES = 2**24
_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "json"}
_FORMATS |= {".ndjson": "json", ".feather": "feather", ".arrow": "ipc", ".ipc": "ipc"}
_TEXT_FORMATS = ("csv", "tsv", "json")
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4", ".br")  # compressions that Arrow recognizes by the end of a file's name
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # the name of the directory for rows without a value


class OpenedFiles(NamedTuple):
    """Files with the same columns.

    Attributes:
        fragments: each ``pyarrow.dataset.Fragment`` that can be read separately (a Parquet row group or a file), with
            its number of rows.
        schema: the columns of all files and directories together.
    """

    fragments: list[tuple[Any, int]]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class _File:
    """A file to read.

    Attributes:
        filesystem: a ``pyarrow.fs.FileSystem``.
        path: the path in this filesystem.
        size: the number of bytes.
        is_given: True if the user has given this path, False if it was found in a directory or by a pattern.
        keys: the columns that the names of its directories contain, such as ``region=eu``.
    """

    filesystem: Any
    path: str
    size: int
    is_given: bool
    keys: Mapping[str, str]

    @property
    def format(self) -> str | None:
        """The format that the name of the file states; None if it states no known format."""
        stem, suffix = os.path.splitext(self.path)
        if suffix.lower() in _COMPRESSIONS:
            text_format = _FORMATS.get(os.path.splitext(stem)[1].lower())
            return text_format if text_format in _TEXT_FORMATS else None
        return _FORMATS.get(suffix.lower())


def open_files(name: str, dataset: Any) -> OpenedFiles:
    """Open one path, or several.

    Args:
        name: the name of the dataset.
        dataset: a path, pattern or URI, or a list of them.

    Raises:
        ConfigurationError: there are no such files, they cannot be opened, or their columns have different types.
    """
    import pyarrow as pa

    given = [os.fspath(path) for path in ([dataset] if isinstance(dataset, (str, os.PathLike)) else dataset)]
    try:
        files = [file for path in given for file in _find(name, path, keys_in_whole_path=len(given) > 1)]
    except (OSError, pa.ArrowException) as error:
        raise _cannot_open(name, given, error) from error
    files, kind = _select_format(name, files)
    files = [file for file in files if file.size or kind not in _TEXT_FORMATS]
    if not files:
        raise ConfigurationError(
            f"[DT-742] dataset {name!r}: expected files that can be opened, got no files at {given}"
        )
    file_format = _arrow_format(kind)
    key_types = _key_types(files)
    fragments = [_make_fragment(file_format, file, key_types) for file in files]
    counted = _inspect(name, fragments, kind)
    schema = _unify(
        name, [(fragment.path, schema) for fragment, (schema, _) in zip(fragments, counted, strict=True)], kind
    )
    _check_large_integers(name, counted, schema)
    if kind == "json":  # by default, a fragment has only the columns at the start of its file
        file_format = _arrow_format(kind, schema)
        fragments = [_make_fragment(file_format, file, key_types) for file in files]
        counted = [(schema, [(fragment, rows)]) for fragment, (_, [(_, rows)]) in zip(fragments, counted, strict=True)]
    for key, key_type in key_types.items():
        if key not in schema.names:
            schema = schema.append(pa.field(key, key_type))
    check_names(name, schema.names)
    return OpenedFiles([part for _, parts in counted for part in parts], schema)


def inspect_fragments(name: str, dataset: Any) -> OpenedFiles:
    """Return the fragments of the user's ``pyarrow.dataset.Dataset``, with the schema that the user has chosen.

    Raises:
        ConfigurationError: the dataset has a filter, or its files cannot be opened.
    """
    check_names(name, dataset.schema.names)
    try:
        fragments = list(dataset.get_fragments())
    except ValueError as error:  # a filter
        raise ConfigurationError(
            f"[DT-742] dataset {name!r}: expected a pyarrow dataset of files, got one whose files cannot be listed: "
            f"{error} Pass dataset.to_table(), or filter the rows in the train function"
        ) from error
    return OpenedFiles([part for _, parts in _inspect(name, fragments) for part in parts], dataset.schema)


def _cannot_open(name: str, paths: Any, error: object) -> ConfigurationError:
    return ConfigurationError(
        f"[DT-742] dataset {name!r}: expected files that can be opened, got an error for {paths}: {error}"
    )


def _find(name: str, given: str, keys_in_whole_path: bool) -> Iterator[_File]:
    """Yield the files at a path, at the paths that match a pattern, or in a directory and those below it.

    Names that begin with a dot or an underscore are skipped, unless the path itself has such a name.

    Args:
        name: the name of the dataset.
        given: the path, pattern or URI.
        keys_in_whole_path: True if all directories of a file's path are searched for columns, as in
            ``pyarrow.dataset.dataset(paths)``; False if only those below the given directory are.
    """
    from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

    if not given:
        raise FileNotFoundError("the path is empty")
    if "://" in given:
        filesystem, base = FileSystem.from_uri(given)
        paths = [base]
    else:
        filesystem = LocalFileSystem()
        base, paths = _expand(os.path.abspath(os.path.expanduser(given)))
        if not paths:
            raise ConfigurationError(
                f"[DT-742] dataset {name!r}: expected files that can be opened, got no files at {[given]}"
            )
    visible = [path for path in paths if path == base or not _is_hidden(os.path.basename(path))]
    for path, info in zip(visible, filesystem.get_file_info(visible), strict=True):
        if info.type is FileType.NotFound:
            raise FileNotFoundError(f"{path} does not exist")
        if info.type is FileType.File:
            above = base if path != base else "" if keys_in_whole_path else os.path.dirname(path)
            yield _File(filesystem, path, info.size, path == base, _keys(path, above))
            continue
        found = filesystem.get_file_info(FileSelector(path, recursive=True))
        for file in sorted(found, key=lambda file: file.path):
            below = file.path.removeprefix(path).strip("/").split("/")
            if file.type is FileType.File and not any(map(_is_hidden, below)):
                yield _File(filesystem, file.path, file.size, False, _keys(file.path, base))


def _expand(path: str) -> tuple[str, list[str]]:
    """Return the directory above a pattern, and the paths that match it. A path that exists is not a pattern."""
    if os.path.lexists(path) or not glob.has_magic(path):
        return path, [path]
    literal, rest = path, ""
    while not os.path.isdir(literal):
        literal, last = os.path.split(literal)
        rest = os.path.join(last, rest) if rest else last
    return literal, sorted(glob.glob(os.path.join(glob.escape(literal), rest), recursive=True))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _keys(path: str, base: str) -> dict[str, str]:
    """Return the columns in the names of directories below another one: ``{"region": "eu"}`` for ``region=eu``."""
    directories = os.path.dirname(path).removeprefix(base).split("/")
    pairs = (directory.split("=", 1) for directory in directories if "=" in directory.strip("="))
    return {key: unquote(value) for key, value in pairs}


def _select_format(name: str, files: list[_File]) -> tuple[list[_File], str]:
    """Return the files to read, and their format: Parquet if no name states a format.

    A file that the user has not named, and whose name states no format, is skipped if other names do: a README.
    """
    formats = {kind for file in files if (kind := file.format) is not None}
    if len(formats) > 1:
        suffixes = sorted({os.path.splitext(file.path)[1] for file in files if file.format is not None})
        raise ConfigurationError(
            f"[DT-742] dataset {name!r}: expected files of one format, got {', '.join(suffixes)}. Select some of them "
            "with a pattern, such as 'directory/*.parquet'"
        )
    if not formats:
        return files, "parquet"
    return [file for file in files if file.is_given or file.format is not None], formats.pop()


def _arrow_format(kind: str, columns: pa.Schema | None = None) -> Any:
    import pyarrow.csv
    import pyarrow.dataset as ds
    import pyarrow.json

    if kind == "parquet":
        return ds.ParquetFileFormat()
    if kind == "json":
        return ds.JsonFileFormat(
            default_fragment_scan_options=ds.JsonFragmentScanOptions(
                parse_options=pyarrow.json.ParseOptions(explicit_schema=columns),
                read_options=pyarrow.json.ReadOptions(block_size=_JSON_BLOCK_BYTES),
            )
        )
    if kind in ("csv", "tsv"):
        return ds.CsvFileFormat(parse_options=_csv_options(kind))
    return ds.FeatherFileFormat() if kind == "feather" else ds.IpcFileFormat()


def _csv_options(kind: str | None) -> Any:
    import pyarrow.csv

    return pyarrow.csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",", newlines_in_values=True)


def _key_types(files: Iterable[_File]) -> dict[str, pa.DataType]:
    """Return the type of each column in the names of directories: an integer if all of its values are integers."""
    import pyarrow as pa

    values: dict[str, set[str]] = collections.defaultdict(set)
    for file in files:
        for key, value in file.keys.items():
            values[key].add(value)
    types = {}
    for key, found in values.items():
        numbers = all(re.fullmatch(r"-?\d{1,18}", value) for value in found - {_NO_VALUE})
        small = numbers and all(abs(int(value)) < 2**31 for value in found - {_NO_VALUE})
        types[key] = pa.int32() if small else pa.int64() if numbers else pa.string()
    return types


def _make_fragment(file_format: Any, file: _File, key_types: Mapping[str, pa.DataType]) -> Any:
    import pyarrow as pa
    import pyarrow.dataset as ds

    expression = ds.scalar(True)
    for key, text in file.keys.items():
        if text == _NO_VALUE:
            expression &= ds.field(key).is_null()
        else:
            value = text if key_types[key] == pa.string() else int(text)
            expression &= ds.field(key) == pa.scalar(value, key_types[key])
    return file_format.make_fragment(file.path, file.filesystem, partition_expression=expression)


def _inspect(name: str, fragments: list[Any], kind: str | None = None) -> list[tuple[pa.Schema, list[tuple[Any, int]]]]:
    """Return the columns of each fragment, and the parts of it that can be read separately, with their rows."""
    import pyarrow as pa

    def inspect(fragment: Any) -> tuple[pa.Schema, list[tuple[Any, int]]]:
        try:
            return _inspect_one(fragment, kind)
        except (OSError, pa.ArrowException) as error:
            raise _cannot_open(name, getattr(fragment, "path", fragment), error) from error

    with ThreadPoolExecutor(_METADATA_THREADS) as pool:
        return list(pool.map(inspect, fragments))


def _inspect_one(fragment: Any, kind: str | None) -> tuple[pa.Schema, list[tuple[Any, int]]]:
    import pyarrow.dataset as ds

    if isinstance(fragment, ds.ParquetFileFragment):
        groups = [(group, group.row_groups[0].num_rows) for group in fragment.split_by_row_group()]
        return fragment.physical_schema, groups
    if kind in ("csv", "tsv"):
        schema, rows = _inspect_csv(fragment, kind)
    elif kind == "json":
        schema, rows = _inspect_json(fragment)
    else:
        schema, rows = fragment.physical_schema, fragment.count_rows()
    return schema, [(fragment, rows)]


_whole_file = threading.Lock()  # limits memory: one CSV file at a time is read as a whole


def _inspect_csv(fragment: Any, kind: str) -> tuple[pa.Schema, int]:
    """Return the columns and the number of rows of a CSV file. All values are parsed, so that none fails later."""
    import pyarrow as pa
    import pyarrow.csv

    try:
        rows = sum(batch.num_rows for batch in fragment.to_batches(use_threads=False, batch_readahead=1))
        return fragment.physical_schema, rows
    except pa.ArrowInvalid:  # a value does not have the type of the values at the start of the file
        with _whole_file, fragment.filesystem.open_input_stream(fragment.path) as stream:
            table = pyarrow.csv.read_csv(stream, parse_options=_csv_options(kind))
            return table.schema, table.num_rows


def _inspect_json(fragment: Any) -> tuple[pa.Schema, int]:
    """Return the columns and the number of rows of a JSON Lines file: a column can begin anywhere in the file."""
    import pyarrow as pa
    import pyarrow.json

    schema, rows, rest = pa.schema([]), 0, b""
    with fragment.filesystem.open_input_stream(fragment.path) as stream:
        while block := stream.read(_JSON_BLOCK_BYTES):
            lines, _, rest = (rest + block).rpartition(b"\n")
            if lines.strip():
                schema, rows = _add_lines(schema, rows, lines)
        if rest.strip():
            schema, rows = _add_lines(schema, rows, rest)
    return schema, rows


def _add_lines(schema: pa.Schema, rows: int, lines: bytes) -> tuple[pa.Schema, int]:
    import pyarrow as pa
    import pyarrow.json

    if lines.lstrip().startswith(b"["):
        raise pa.ArrowInvalid("expected one JSON object per line (JSON Lines), got an array")
    options = pyarrow.json.ReadOptions(block_size=len(lines) + 1)
    table = pyarrow.json.read_json(pa.BufferReader(lines), read_options=options)
    return _merge(schema, table.schema, "json"), rows + table.num_rows


def _unify(name: str, schemas: Sequence[tuple[str, pa.Schema]], kind: str) -> pa.Schema:
    """Return the columns of all files, each with a type that can represent the values in all files.

    Raises:
        ConfigurationError: there is no such type for a column, or a file has several columns of one name.
    """
    import pyarrow as pa

    unified = schemas[0][1]
    for path, schema in schemas:
        check_names(name, schema.names)
        try:
            unified = _merge(unified, schema, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigurationError(
                f"[DT-742] dataset {name!r}: expected the types of columns to be the same in all files, got another "
                f"type in {path}: {error}. Convert the column to one type in all files"
            ) from error
    return unified


def _check_large_integers(
    name: str, counted: Iterable[tuple[pa.Schema, list[tuple[Any, int]]]], schema: pa.Schema
) -> None:
    """Refuse integers that no float can represent, if the type of their column was widened to floats.

    Raises:
        ConfigurationError: the statistics of a Parquet file contain such an integer.
    """
    import pyarrow.dataset as ds
    from pyarrow import types

    floats = {column.name for column in schema if types.is_floating(column.type)}
    for columns, parts in counted:
        widened = [column.name for column in columns if column.name in floats and types.is_integer(column.type)]
        for fragment, _ in parts if widened else ():
            if not isinstance(fragment, ds.ParquetFileFragment):
                continue
            statistics = fragment.row_groups[0].statistics or {}
            for column in widened:
                largest = max(statistics.get(column, {0: 0}).values(), key=abs)
                if abs(largest) > 2**53:
                    raise ConfigurationError(
                        f"[DT-742] dataset {name!r}: expected integers below 2**53 in column {column!r}, which has "
                        f"floats in other files, got {largest} in {fragment.path}. Convert the column to one type in "
                        "all files"
                    )


def _merge(unified: pa.Schema, schema: pa.Schema, kind: str) -> pa.Schema:
    """Add the columns of a schema to another one, and widen the types of columns that both have."""
    import pyarrow as pa

    if schema.equals(unified):
        return unified
    fields = {column.name: column for column in unified}
    for column in schema:
        present = fields.get(column.name)
        if present is None:
            fields[column.name] = column
        elif present.type != column.type:
            fields[column.name] = _wider(present, column, kind)
    return pa.schema(fields.values(), unified.metadata)


def _wider(first: pa.Field, second: pa.Field, kind: str) -> pa.Field:
    """Return a column whose type represents the values of two columns. Text remains text, whatever it resembles."""
    import pyarrow as pa

    if pa.types.is_dictionary(first.type) != pa.types.is_dictionary(second.type):  # categories in one file only
        first, second = (
            column.with_type(column.type.value_type) if pa.types.is_dictionary(column.type) else column
            for column in (first, second)
        )
    try:
        both = [pa.schema([column.with_nullable(True)]) for column in (first, second)]
        return pa.unify_schemas(both, promote_options="permissive").field(0)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        types = {first.type, second.type} - {pa.string()}
        if kind in ("csv", "tsv") or (kind == "json" and len(types) == 1 and pa.types.is_temporal(*types)):
            return first.with_type(pa.string())
        raise
