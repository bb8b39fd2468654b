"""One self-contained HTML page, and the same figures as JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from megatron_loco.launch.report_arms import differences, notes_on_run
from megatron_loco.launch.report_runs import LOSS, VALIDATION_LOSS, Run
from megatron_loco.launch.report_verdict import MIN_EVALUATIONS, MIN_INTERVALS, MIN_LOSSES, Verdict
from megatron_loco.launch.values import Value

HEADERS = (
    "runs",
    "at iteration",
    "validation loss",
    "difference ± noise",
    "verdict on the loss",
    "step (ms), quartiles",
    "speed-up (range)",
    "verdict on the speed",
    "MB/step: sent, in bf16",
    "bytes, whole run",
)

METHOD = (
    "A row stands for runs with the same resolved settings apart from the seed. Difference: the last validation loss "
    "that the row and the baseline both have, minus the baseline's; positive is worse. Without a common validation it "
    "is the training loss, and says so.",
    "Noise: half-width of the 95 % interval of that difference (Student's t). With several seeds it comes from their "
    "spread, seed by seed where both sides have the same ones; two seeds hardly ever suffice. With one seed each it is "
    "how far the difference scatters about a straight line through the second half of the common evaluations (at least "
    f"{MIN_EVALUATIONS}; if there are fewer, of the training losses, at least {MIN_LOSSES}). That does not hold what "
    "another seed would give, which can be several times more: add runs of other seeds to see it.",
    f"Step time: median over the logging intervals after the warm-up (at least {MIN_INTERVALS} for a verdict), the "
    "same iterations for all, with quartiles (of several runs taken together, widened to the medians of each); the "
    "range of the speed-up divides them crosswise. With one run each it does not hold how busy the machine was at the "
    "time of the one and of the other.",
    "Bytes: what each rank sends per step for gradients, after the warm-up, and what a ring reduce-scatter in bf16 "
    "would send; the last column is bf16 over sent for the whole run with its exact warm-up. Runs without LoCo do not "
    "count theirs.",
)

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff; margin: 2rem auto; max-width: 1150px;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: left; vertical-align: top; }
td { min-width: 5.5rem; }
th { border-bottom: 2px solid #555; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


def row(verdict: Verdict) -> list[str]:
    """The cells of a verdict under :data:`HEADERS`, as plain text."""
    loss, steps, traffic = verdict.loss, verdict.steps, verdict.traffic
    difference = speed_up = ""
    if loss.difference is not None:
        noise = "not known" if loss.noise is None else f"{loss.noise:.4f}"
        difference = f"{loss.difference:+.4f} ± {noise}"
    if verdict.speed_up is not None:
        speed_up = "{:.2f} ({:.2f}–{:.2f})".format(*verdict.speed_up)
    return [
        verdict.arm.name + (" = baseline" if verdict.is_baseline else ""),
        "" if loss.iteration is None else str(loss.iteration),
        ("" if loss.value is None else f"{loss.value:.4f}") + (" (training)" if loss.tag == LOSS else ""),
        difference,
        loss.verdict,
        f"{steps.median * 1e3:.0f} ({steps.low * 1e3:.0f}–{steps.high * 1e3:.0f})" if steps else "not logged",
        speed_up,
        verdict.speed,
        f"{traffic.wire / 1e6:.3f}, {traffic.bf16 / 1e6:.3f}: {_ratio(traffic.bf16, traffic.wire)}"
        if traffic
        else "not counted",
        f"{traffic.whole_run:.2f} times less" if traffic else "",
    ]


def notes(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """What limits the comparison: name of an arm or run, and the remark."""
    found = []
    for verdict in verdicts:
        found += [(verdict.arm.name, note) for note in verdict.notes]
        if verdict.loss.derived:
            found.append((verdict.arm.name, f"noise from: {verdict.loss.derived}"))
        found += [(run.name, note) for run in verdict.arm.runs for note in notes_on_run(run)]
    return found


def html(verdicts: Sequence[Verdict], png: bytes) -> str:
    """The page.

    Args:
        verdicts: All arms.
        png: The figure, embedded in the page.

    Returns:
        A document that needs no other file and no network; its own policy forbids both.
    """
    runs = [run for verdict in verdicts for run in verdict.arm.runs]
    image = base64.b64encode(png).decode("ascii")
    parts = [
        f"<h1>{escape(', '.join(verdict.arm.name for verdict in verdicts))}</h1>",
        "<h2>Verdict</h2>",
        _table(HEADERS, [row(verdict) for verdict in verdicts]),
        "<h2>What limits it</h2>",
        "<ul>" + "".join(f"<li><b>{escape(name)}</b>: {escape(note)}</li>" for name, note in notes(verdicts)) + "</ul>",
        "<h2>Curves</h2>",
        f'<img alt="Curves of the runs; the tables hold their figures" src="data:image/png;base64,{image}">',
        "<h2>Validation loss</h2>",
        _curves(runs, VALIDATION_LOSS),
        "<h2>Settings that differ from the baseline</h2>",
        _settings(verdicts),
        "<h2>How it was computed</h2>",
        *(f"<p>{escape(text)}</p>" for text in METHOD),
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><title>megatron_loco: report on runs</title>'
        f"<style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def as_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as JSON: seconds, bytes, nats per token; what is NaN or infinite is null."""
    report = [
        {
            "name": verdict.arm.name,
            "baseline": verdict.is_baseline,
            "runs": [
                {
                    "name": run.name,
                    "seed": (run.settings or {}).get("seed"),
                    "last_iteration": run.last_iteration,
                    "final_validation_loss": run.final(VALIDATION_LOSS),
                    "notes": notes_on_run(run),
                }
                for run in verdict.arm.runs
            ],
            "loss": vars(verdict.loss),
            "step_seconds": vars(verdict.steps) if verdict.steps else None,
            "speed_up": dict(zip(("median", "low", "high"), verdict.speed_up, strict=True))
            if verdict.speed_up
            else None,
            "speed_verdict": verdict.speed,
            "bytes_per_step": vars(verdict.traffic) if verdict.traffic else None,
            "notes": verdict.notes,
        }
        for verdict in verdicts
    ]
    return json.dumps({"arms": _finite(report), "method": METHOD}, indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _ratio(bf16: float, wire: float) -> str:
    return f"{bf16 / wire:.2f} times less" if wire else "nothing sent"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headers)
    body = "".join("<tr>" + "".join(map(_cell, cells)) + "</tr>" for cells in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    number = text[:1].isdigit() or text[:1] in ("+", "-")
    return f'<td class="number">{escape(text)}</td>' if number else f"<td>{escape(text)}</td>"


def _curves(runs: Sequence[Run], tag: str) -> str:
    iterations = sorted({iteration for run in runs for iteration in run.scalars.get(tag, {})})
    if not iterations:
        return "<p>None was logged.</p>"
    rows = []
    for iteration in iterations:
        values = (run.at(tag, iteration) for run in runs)
        rows.append([str(iteration), *("" if value is None else f"{value:.4f}" for value in values)])
    return _table(["iteration", *(run.name for run in runs)], rows)


def _settings(verdicts: Sequence[Verdict]) -> str:
    base = next(verdict.arm.runs[0] for verdict in verdicts if verdict.is_baseline)
    others = [verdict.arm.runs[0] for verdict in verdicts if not verdict.is_baseline]
    found = [differences(run, base) for run in others]
    keys = sorted({key for pairs in found for key in pairs})
    if not keys:
        return "<p>None that is known.</p>"
    base_values = {key: pair[1] for pairs in found for key, pair in pairs.items()}
    rows = []
    for key in keys:
        cells = [_setting(pairs[key][0]) if key in pairs else "as the baseline" for pairs in found]
        rows.append([key, _setting(base_values[key]), *cells])
    return _table(["setting", f"{base.name} (baseline)", *(run.name for run in others)], rows)


def _setting(value: Value) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
