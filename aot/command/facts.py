"""Gather the results of each command in a JSON object.

The printed text (`printed`) is made from these objects too, so that `--json` leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jointcut.aot.cache.store import StoredEntry
from jointcut.aot.call.doctor.doctor import Diagnosis
from jointcut.aot.call.largest import Largest
from jointcut.aot.export.artefact import SIGNATURE
from jointcut.aot.export.contract import Contract
from jointcut.aot.report.report import Report
from jointcut.aot.stages.cut import Cut

JSON = dict[str, Any]


def of_report(
    report: Report, cut: Cut, file: Path | None, trace: Path | None = None, profile: Path | None = None
) -> JSON:
    """Return the contents of a report, with facts that the report lacks.

    These are the number of plans compiled for its budget, the bytes spilled to files, and the files that it was written
    to.
    """
    compiled = None if cut.fitted is None else len(cut.fitted.trail)
    written = {"file": file, "perfetto": trace, "pprof": profile}
    files = {name: None if path is None else str(path) for name, path in written.items()}
    return {**report.to_dict(), "spilled_bytes": cut.bytes_spilled, "plans_compiled": compiled, **files}


def of_diagnosis(found: Diagnosis) -> JSON:
    """Return what a function takes of a device's memory, and why."""
    known = {"function": found.name, "memory_bytes": found.memory_bytes, "fits": found.fits}
    account = {**vars(found.account), "peak_bytes": found.account.peak_bytes}
    return {**known, "account": account, "causes": [vars(cause) for cause in found.causes]}


def of_largest(found: Largest, cut: Cut) -> JSON:
    """Return the largest size, the sizes that were tried, and the figures of the plan."""
    goal, plan = cut.traced.options.goal, cut.plan
    tried = [{**vars(row), "seconds_per_example": row.seconds_per_example} for row in found.tried]
    figures = {"budget_bytes": found.budget_bytes, "peak_bytes": found.peak_bytes, "step_seconds": found.step_seconds}
    chosen = {"strategy": plan.strategy, "saved_bytes": plan.bytes_saved, "again_ops": len(plan.recomputed)}
    target = None if goal is None else goal.name
    known = {"function": found.name, "axis": found.axis, "size": found.size, "target": target}
    return {**known, **figures, "in_blocks": [*found.tiles], "plan": chosen, "tried": tried}


# -------------------------------------------------------------------------------------------------------- artefacts


def of_artefact(folder: Path, signature: JSON, contract: Contract) -> JSON:
    """Return the signature of an artefact, its folder, and the bytes of its files and saved residuals."""
    sizes = [file["bytes"] for file in signature["files"].values()]  # all files except the signature
    total = sum(sizes) + (folder / SIGNATURE).stat().st_size
    totals = {"folder": str(folder), "total_bytes": total, "saved_bytes": contract.saved_bytes}
    return {**totals, **signature}


# ------------------------------------------------------------------------------------------------------------ cache


def of_cache(folder: Path, entries: Sequence[StoredEntry], total_bytes: int) -> JSON:
    """Return the entries of a cache; `last_used` is in seconds since 1970."""
    listed = [{"key": e.key, "label": e.label, "bytes": e.nbytes, "last_used": e.last_used} for e in entries]
    return {"folder": str(folder), "total_bytes": total_bytes, "entries": listed}
