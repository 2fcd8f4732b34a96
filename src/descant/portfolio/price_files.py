"""Files of daily prices: npz, CSV and Parquet."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DescantError, PartyError
from .market import EXPECTED_FORMAT, Market, market_error


def read_market(file: str | Path, price_column: str = "adj_close") -> Market:
    """Read a market from a .npz, .csv or .parquet file.

    `price_column` names the matrix of prices in an npz file. In a CSV file the first column holds the dates, each other
    column is named after its asset, and an empty cell is a missing price. In a Parquet file the dates are the one
    column without numbers.
    """
    file = Path(file)
    readers: dict[str, Callable[[Path], tuple[Any, Any, Any]]] = {
        ".npz": partial(_read_npz, column=price_column),
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    if file.suffix.lower() not in readers:
        raise PartyError(
            f"{file} cannot be used: its suffix is {file.suffix or 'missing'!r}. Expected {EXPECTED_FORMAT}."
        )
    with _convert_errors(file):
        dates, names, prices = readers[file.suffix.lower()](file)
    return Market.create(dates, names, prices, str(file))


@contextmanager
def _convert_errors(file: Path) -> Iterator[None]:
    """Convert any error inside into one that names the file."""
    try:
        yield
    except DescantError:
        raise
    except FileNotFoundError as error:
        raise PartyError(f"There is no file {file}. Expected {EXPECTED_FORMAT}.") from error
    except Exception as error:  # a damaged file may raise anything in numpy, csv or pyarrow
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        if "pickle" in reason:  # numpy's message would suggest allow_pickle
            reason = "it holds objects, or no arrays at all"
        raise market_error(str(file), f"{reason} ({type(error).__name__})", EXPECTED_FORMAT) from error


def _read_npz(file: Path, column: str) -> tuple[Any, Any, Any]:
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:  # noqa: TID251
        for name in ("dates", "tickers", column):
            if name not in archive.files:
                raise market_error(
                    str(file), f"it has no {name!r}, only {', '.join(archive.files) or 'nothing'}", EXPECTED_FORMAT
                )
        return archive["dates"], archive["tickers"], archive[column]


def _read_csv(file: Path) -> tuple[Any, Any, Any]:
    with file.open(encoding="utf-8-sig", newline="") as opened:
        header, *rows = [line for line in csv.reader(opened, strict=True) if line] or [[]]
    if header and header[0][:1].isdigit():  # a date instead of a name; names of assets may be numbers
        raise market_error(str(file), f"its first line is {','.join(header):.60}", "a first line of names")
    if len(header) == 1 and re.search(r"[;\t]", header[0]):
        expected = "a .csv file with commas between the fields and decimal points in the prices"
        raise market_error(str(file), f"its first line is {header[0]:.60}", expected)
    for line in rows:
        if len(line) != len(header):
            raise market_error(
                str(file), f"the row of {line[0]} has {len(line)} fields", f"{len(header)} fields per row"
            )
    prices = [
        [_parse_price(file, line[0], name, cell=cell) for name, cell in zip(header[1:], line[1:], strict=True)]
        for line in rows
    ]
    return [line[0] for line in rows], header[1:], prices


def _parse_price(file: Path, date: str, name: str, cell: str) -> float:
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        raise market_error(str(file), f"the price of {name} on {date} is {cell!r}", "a number, or nothing") from None


def _read_parquet(file: Path) -> tuple[Any, Any, Any]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise PartyError(
            f"Reading {file} needs pyarrow: pip install pyarrow. A .csv file needs no extra package."
        ) from error
    with file.open("rb") as opened:
        table = parquet.read_table(opened)
    columns = dict(zip(table.column_names, table.columns, strict=True))
    prices = {name: column.to_numpy() for name, column in columns.items()}
    dates = [name for name, column in prices.items() if column.dtype.kind not in "fiu"]
    if len(dates) != 1:
        raise market_error(str(file), f"its columns without numbers are {', '.join(dates) or 'none'}", EXPECTED_FORMAT)
    matrix = [column for name, column in prices.items() if name not in dates]
    return columns[dates[0]].to_pylist(), [name for name in prices if name not in dates], np.array(matrix).T
