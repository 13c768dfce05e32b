"""Decides which file a checkpoint contains if several ranks have stored files of the same name.

The rank alone decides, so the outcome does not depend on which rank was faster. Contents are compared only if different
content has to be an error, because comparing large files takes longer than storing them.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain._storage.layout import METADATA_FILE
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain._storage.directory import Storage
    from drivetrain._storage.filesystem import StoredFile

__all__ = ["describe_ranks", "duplicates_of", "settle_duplicates"]

_SHOWN = 4


def settle_duplicates(
    storage: Storage,
    name: str,
    files: Mapping[int, Mapping[str, StoredFile]],
    *,
    on_conflict: str = "lowest_rank",
    committed: Mapping[str, StoredFile] | None = None,
) -> tuple[dict[str, StoredFile], dict[str, list[int]]]:
    """Give each file of a checkpoint its final path, and delete the files that the checkpoint does not keep.

    Args:
        storage: the run directory.
        name: the directory in which the ranks stored their files.
        files: the results of :func:`~drivetrain._storage.upload.put_directory`, by rank.
        on_conflict: see :class:`~drivetrain.CheckpointConfig`.
        committed: the files that the checkpoint contains already. They are kept unchanged.

    Returns:
        The files of the checkpoint by relative path, and the ranks that reported the same file by its relative path.

    Raises:
        CheckpointError: with ``on_conflict="error"``, two ranks stored different content under the same path.
    """
    owners: dict[str, list[int]] = {}
    for rank in sorted(files):
        for relative in files[rank]:
            owners.setdefault(relative, []).append(rank)
    apart = _stored_apart(storage, name, files)
    merged = dict(committed or {})
    conflicts: dict[str, list[int]] = {}
    for relative, ranks in owners.items():
        kept, others = (None, ranks) if relative in merged else (ranks[0], ranks[1:])
        if others:
            if on_conflict == "error" or not apart:
                _require_same_content(storage, name, relative, files, apart)
            elif posixpath.basename(relative) != METADATA_FILE:
                conflicts[relative] = ranks
                if on_conflict == "keep_all":
                    merged |= _keep(storage, name, relative, others, files, apart)
        if kept is not None:
            if relative in apart.get(kept, ()):
                storage.move(f"{name}/{duplicates_of(kept)}/{relative}", f"{name}/{relative}")
            merged[relative] = files[kept][relative]
    for rank in apart:
        storage.delete(f"{name}/{duplicates_of(rank)}")
    return merged, conflicts


def duplicates_of(rank: int) -> str:
    """Return the name of the directory, below that of a checkpoint, for a rank's files that another rank stores too."""
    return f".rank_{rank}"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks as text, such as ``ranks 0, 1 and 2``."""
    if not ranks:
        return "no rank"
    shown = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        shown.append(f"{len(ranks) - _SHOWN} more")
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else f"rank {shown[0]}"


def _stored_apart(storage: Storage, name: str, ranks: Collection[int]) -> dict[int, set[str]]:
    """Return the relative paths of the files that each rank has stored in its own directory of duplicates."""
    present = storage.list_names(name)[0]
    return {
        rank: set(storage.walk(f"{name}/{duplicates_of(rank)}")) for rank in ranks if duplicates_of(rank) in present
    }


def _keep(
    storage: Storage,
    name: str,
    relative: str,
    ranks: Iterable[int],
    files: Mapping[int, Mapping[str, StoredFile]],
    apart: Mapping[int, Collection[str]],
) -> dict[str, StoredFile]:
    """Move the files of ranks to ``rank_<rank>/``; return them by their new relative path."""
    kept = {}
    for rank in ranks:
        is_apart = relative in apart.get(rank, ())
        source = f"{name}/{duplicates_of(rank)}/{relative}" if is_apart else f"{name}/{relative}"
        storage.move(source, f"{name}/rank_{rank}/{relative}")
        kept[f"rank_{rank}/{relative}"] = files[rank][relative]
    return kept


def _require_same_content(
    storage: Storage,
    name: str,
    relative: str,
    files: Mapping[int, Mapping[str, StoredFile]],
    apart: Mapping[int, Collection[str]],
) -> None:
    owners = [rank for rank in sorted(files) if relative in files[rank]]
    facts = [files[rank][relative] for rank in owners]
    checksums = {known.crc32 for known in facts if known.crc32 is not None}
    is_same = len(checksums) <= 1 and len({known.size for known in facts}) == 1
    if is_same and storage.is_local:
        path = storage.path(name, relative)
        for rank in owners:
            if relative in apart.get(rank, ()) and os.path.lexists(path):
                is_same &= _same_content(storage.path(name, duplicates_of(rank), relative), path)
    if not is_same:
        raise CheckpointError(
            f"[DT-410] {describe_ranks(owners)} reported {relative!r} for {name} with different content. Report the "
            "file from one rank only, put the rank into its name, or leave out CheckpointConfig(on_conflict='error')"
        )


def _same_content(first: str, second: str, block_bytes: int = 1 << 20) -> bool:
    if os.path.getsize(first) != os.path.getsize(second):
        return False
    with open(first, "rb") as left, open(second, "rb") as right:
        while block := left.read(block_bytes):
            if block != right.read(block_bytes):
                return False
    return True
