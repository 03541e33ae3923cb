"""Where a sweep's rows are kept: a directory of Parquet files, one for each case, which its key names.

A file appears when it is complete, and there is one name for a case: so nothing that was done is lost, and nothing is
counted twice, whenever anything is killed.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamadiff.ext.sweep.case import SweepRow
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole

SUFFIX, MADE_OF = ".parquet", "made_of"


class Store:
    """A directory of rows. Raises UserError if it cannot be made, or pyarrow is not there."""

    def __init__(self, folder: Path) -> None:
        if find_spec("pyarrow") is None:
            raise UserError("a sweep's results are Parquet, which needs pyarrow: pip install pyarrow")
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); give another directory with --out") from None

    def done(self, keys: Collection[str]) -> list[SweepRow]:
        """The rows of those cases that are there. Raises UserError for a file that is none of ours."""
        return [self._read(path) for key in keys if (path := self.folder / f"{key}{SUFFIX}").exists()]

    def add(self, row: SweepRow) -> None:
        """Keep a row. Raises UserError if it cannot be written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([asdict(row)], schema=_schema()), data)
        write_whole(self.folder / f"{row.key}{SUFFIX}", data.getvalue())

    def _read(self, path: Path) -> SweepRow:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            read = pq.ParquetFile(path).read()
            read = read if MADE_OF in read.column_names else read.append_column(MADE_OF, [[""]])  # of earlier releases
            (row,) = read.cast(_schema()).to_pylist()
            return SweepRow(**row)
        except (pa.ArrowException, OSError, ValueError, TypeError):
            raise UserError(f"{path}: is not a row of this sweep; remove it, or give another directory with --out"
                            ) from None  # fmt: skip


def _schema() -> Any:
    """The columns, whatever a row leaves out."""
    import pyarrow as pa

    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool | None": pa.bool_()}
    return pa.schema([(field.name, kinds[str(field.type)]) for field in fields(SweepRow)])
