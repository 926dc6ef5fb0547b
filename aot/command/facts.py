"""Gather the results of each command in a JSON object.

The printed text is made from these objects too (`printed`), so that `--json` leaves nothing out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jointcut.aot.cache.store import StoredEntry
from jointcut.aot.command.differences import wide
from jointcut.aot.command.trial import Check, Trial
from jointcut.aot.export.artefact import SIGNATURE
from jointcut.aot.export.contract import Contract
from jointcut.aot.report.report import Report
from jointcut.aot.stages.cut import Cut

JSON = dict[str, Any]


def of_report(report: Report, cut: Cut, file: Path | None) -> JSON:
    """The contents of a report, the number of plans compiled for its budget, the bytes that wait in files, and the file
    that it was written to.
    """
    compiled = None if cut.fitted is None else len(cut.fitted.trail)
    more = {"spilled_bytes": cut.bytes_spilled, "plans_compiled": compiled, "file": None if file is None else str(file)}
    return {**report.to_dict(), **more}


# -------------------------------------------------------------------------------------------------------- artefacts


def of_artefact(folder: Path, signature: JSON, contract: Contract) -> JSON:
    """The signature of an artefact, its folder, and the bytes of its files and of its saved residuals."""
    sizes = [file["bytes"] for file in signature["files"].values()]  # all files except the signature
    total = sum(sizes) + (folder / SIGNATURE).stat().st_size
    totals = {"folder": str(folder), "total_bytes": total, "saved_bytes": contract.saved_bytes}
    return {**totals, **signature}


def of_trial(trial: Trial, checks: Sequence[Check], output: Path | None) -> JSON:
    """The results of a run. `value` is the number of a scalar result; it and `norm` are None where not finite."""
    contract, results = trial.pair.contract, trial.results
    decided = [c.passed for c in checks if c.passed is not None]
    return {
        "function": contract.name,
        "results": {name: _result(value) for name, value in results.items()},
        "cotangents_needed": [] if trial.halves is not None else [str(t) for t in contract.tangents],
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in checks],
        "passed": all(decided) if checks else None,
        "output": None if output is None else str(output),
    }


def _result(value: np.ndarray) -> JSON:
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(wide(value)))
    number = value.item() if value.shape == () and not np.iscomplexobj(value) else None
    return {
        "type": f"{value.dtype}[{','.join(map(str, value.shape))}]",
        "norm": norm if math.isfinite(norm) else None,
        "value": number if math.isfinite(norm) else None,
    }


# ------------------------------------------------------------------------------------------------------------ cache


def of_cache(folder: Path, entries: Sequence[StoredEntry], total_bytes: int) -> JSON:
    """The entries of a cache; `last_used` is in seconds since 1970."""
    listed = [{"key": e.key, "label": e.label, "bytes": e.nbytes, "last_used": e.last_used} for e in entries]
    return {"folder": str(folder), "total_bytes": total_bytes, "entries": listed}
