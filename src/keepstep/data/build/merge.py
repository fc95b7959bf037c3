"""Several .bin/.idx pairs into one, for tools that want a single prefix."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keepstep.core.errors import DataError
from keepstep.core.files import sync_folder
from keepstep.data.formats.megatron import DTYPES, MegatronReader, bin_path, idx_path, index_bytes


def merge(prefixes: Sequence[Path], out: Path) -> tuple[int, int]:
    """Write the documents of all pairs, in order, as one pair; how many documents and tokens it has."""
    readers = [MegatronReader(prefix) for prefix in prefixes]
    kinds = {reader.dtype for reader in readers}
    if len(kinds) != 1:
        raise DataError(
            f"the pairs hold tokens of {len(kinds)} types ({', '.join(sorted(kind.name for kind in kinds))})",
            "merge pairs that were built with one tokenizer and --dtype",
        )
    dtype = kinds.pop()
    code = next(code for code, known in DTYPES.items() if known == dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with bin_path(aside).open("wb") as target:
            for reader in readers:
                with bin_path(reader.prefix).open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 22)
            target.flush()
            os.fsync(target.fileno())
        lengths = np.concatenate([reader.document_lengths() for reader in readers])
        with idx_path(aside).open("wb") as target:
            target.write(index_bytes(lengths.astype(np.int32), code))
            target.flush()
            os.fsync(target.fileno())
        bin_path(aside).replace(bin_path(out))
        idx_path(aside).replace(idx_path(out))
        sync_folder(out.parent)
    finally:
        bin_path(aside).unlink(missing_ok=True)
        idx_path(aside).unlink(missing_ok=True)
    return len(lengths), int(lengths.sum())
