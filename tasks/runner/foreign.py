"""Figure 1 for models of timm and Hugging Face transformers: does a model attend towards its own values?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from results.record import BenchRecord, utc_now
from results.tables import Column, Table
from tasks.errors import UserError
from tasks.runner import recording
from tasks.runner.config.schema import LoopConfig
from tasks.runner.device import choose_device
from tasks.runner.foreign_models import Foreign, image_batches, image_files, load, longest, text_batches
from tasks.runner.probing import heads, means, row
from xsa_core.adapters import convert, converted_layers
from xsa_core.adapters.probing import probe_as_it_stands, probe_converted
from xsa_core.attention.probe import LayerStatistics

NAME = "probe-model"
STANDS, CONVERTED = "as it stands", "converted"
TITLES = {
    "cosine_output_value": "cos(output, own value)",
    "diagonal_weight": "weight a token gives itself",
    "cosine_values": "cos of two tokens' values",
}
FEW = 12  # layers that each have a tick in the figure

SHORT = {
    "cosine_output_value": "cos(y, v)",
    "diagonal_weight": "a_ii",
    "cosine_values": "cos(v_i, v_j)",
}


@dataclass(frozen=True)
class Outcome:
    """What was measured: the model as it stands, and converted (None where it was exclusive already)."""

    foreign: Foreign
    stands: list[LayerStatistics]
    converted: list[LayerStatistics] | None
    record: BenchRecord


def probe_foreign(
    spec: str,
    *,
    images: str | None,
    text: str | None,
    samples: int,
    batch: int,
    length: int | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    device: str = "auto",
    threads: int = 0,
) -> Outcome:
    """Measure a model as it stands, then converted to full exclusion, on images or on text, in float32.

    Raises:
        UserError: anything wrong with what the user named, or a model that cannot be converted.
    """
    if (images is None) == (text is None):
        raise UserError("--model needs --images DIRECTORY or --text FILE, one of them")
    started = utc_now()
    if images is not None:
        image_files(images)
    elif text is not None and not Path(text).expanduser().is_file():
        raise UserError(f"--text {text}: no such file")
    loop = LoopConfig(max_steps=1, global_batch=1, device=device, threads=threads, precision="float32")
    chosen = choose_device(loop)
    foreign = load(spec, images=images is not None, weights=weights, pretrained=pretrained)
    model = foreign.model.to(chosen.device)
    length = min(length or 256, (longest(model) if text is not None else None) or 256)

    def batches() -> Iterator[Any]:
        if images is not None:
            for pixels in image_batches(foreign, images, samples, batch):
                pixels = pixels.to(chosen.device)
                yield {"pixel_values": pixels} if spec.startswith("hf:") else pixels
        elif text is not None:
            for arguments in text_batches(foreign, text, length, samples, batch):
                yield {k: v.to(chosen.device) if isinstance(v, Tensor) else v for k, v in arguments.items()}

    try:
        was = bool(converted_layers(model))
        stands = probe_as_it_stands(model, batches())
        converted = None if was else probe_converted(convert(model), batches())
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--model {spec}: {error}") from error
    config = {
        "model": spec,
        "weights": foreign.weights,
        "samples": samples,
        "source": Path(images or text).name,
    }
    if text is not None:
        config["length"] = length
    rows = [{"model": STANDS, **row(x)} for x in stands]
    rows += [{"model": CONVERTED, **row(x)} for x in converted or ()]
    record = BenchRecord(
        name=NAME,
        config=config,
        environment=recording.environment(chosen, None, False),
        rows=rows,
        summary=means([x.means() for x in stands]),
        started_at=started,
        finished_at=max(utc_now(), started),
        extra={"heads": [heads(x) for x in stands]},
    )
    return Outcome(foreign, stands, converted, record)


def table(outcome: Outcome) -> Table:
    """Return the statistics of every layer, as it stands and converted side by side."""
    columns = [Column("layer", "layer", digits=None)]
    columns += [Column(f"0_{name}", short) for name, short in SHORT.items()]
    if outcome.converted is not None:
        columns += [Column(f"1_{name}", f"{short}, conv.") for name, short in SHORT.items()]
    rows: dict[int, dict[str, Any]] = {}
    for which, layers in enumerate((outcome.stands, outcome.converted or [])):
        for layer in layers:
            values = layer.means()
            rows.setdefault(layer.layer, {"layer": layer.layer}).update(
                {f"{which}_{name}": values[name] for name in TITLES}
            )
    seen = outcome.stands[0].tokens if outcome.stands else 0
    where = f"{outcome.stands[0].name} to {outcome.stands[-1].name}" if outcome.stands else "none ran"
    notes = (
        "y: output of attention before anything is removed; v: own value; a_ii: weight a token gives itself",
        f"means over heads and {seen:,} tokens of a layer; conv.: the same model, converted; layers: {where}",
        outcome.foreign.weights,
    )
    title = f"Attention towards the own value: {outcome.foreign.name}"
    return Table(NAME, title, tuple(columns), tuple(rows.values()), notes)


def draw(outcome: Outcome, path_stem: Path) -> list[Path]:
    """Draw the three statistics by layer, before and after conversion; return the PNG and SVG paths."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator

    from results.drawing import save
    from results.style import INK, look, styled

    lines = {STANDS: (outcome.stands, look("sa"))}
    if outcome.converted is not None:
        lines[CONVERTED] = (outcome.converted, look("xsa"))
    with styled():
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        for axes, (name, title) in zip(figure.subplots(1, 3), TITLES.items(), strict=True):
            for label, (layers, style) in lines.items():
                values = [layer.means()[name] for layer in layers]
                axes.plot(
                    [layer.layer for layer in layers],
                    values,
                    color=style.colour,
                    linestyle=style.line,
                    marker=style.marker,
                    label=label,
                )
            axes.axhline(0.0, color=INK, linewidth=1.0, zorder=1.5)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("layer")
            numbers = sorted({layer.layer for layer in outcome.stands})
            axes.xaxis.set_major_locator(
                MaxNLocator(integer=True) if len(numbers) > FEW else FixedLocator(numbers)
            )
        figure.axes[0].legend(fontsize=9)
        figure.suptitle(
            f"{outcome.foreign.name} ({outcome.foreign.weights.partition(':')[0]})",
            x=0.01,
            ha="left",
            fontsize=11,
            weight="bold",
        )
        path_stem.parent.mkdir(parents=True, exist_ok=True)
        return save(figure, path_stem)
