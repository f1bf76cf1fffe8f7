"""Figures: drawn for whatever runs there are, legible, and without side effects."""

import matplotlib
import pytest

from results.drawing import log_ticks, moving_average, wrapped
from results.effects import effects
from results.figures import effect_figure, loss_curves
from results.style import VARIANT_LOOKS, arm_looks, look


@pytest.mark.parametrize("evaluations", [0, 1, 6])
def test_curves_are_drawn_however_few_evaluations_there_are(make_run, tmp_path, evaluations):
    runs = [make_run(variant, points=6, evaluations=evaluations) for variant in ("sa", "xsa")]
    paths = loss_curves(runs, tmp_path / "curves.v1", "a title")
    assert [path.name for path in paths] == ["curves.v1.png", "curves.v1.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().rstrip().endswith(b"</svg>")


def test_curves_with_one_point_and_not_a_number_are_drawn(make_run, tmp_path):
    curves = {"train": {"step": [1], "loss": [float("nan")]}}
    failed = make_run("xsa", status="failed", reason="nan", curves=curves)
    assert len(loss_curves([failed], tmp_path / "one")) == 2


def test_runs_without_any_curve_are_an_error_that_says_so(make_run, tmp_path):
    with pytest.raises(ValueError, match="no run has a training or validation curve"):
        loss_curves([make_run(curves={})], tmp_path / "none")


def test_effects_on_different_metrics_do_not_share_an_axis(make_run, tmp_path):
    records = [make_run(variant) for variant in ("sa", "xsa")]
    (effect,) = effects(records)
    (other,) = effects([run.updated(primary_metric="validation_loss") for run in records])
    with pytest.raises(ValueError, match="expected effects on one metric"):
        effect_figure([effect, other], tmp_path / "mixed")
    with pytest.raises(ValueError, match="got none"):
        effect_figure([], tmp_path / "none")


def test_drawing_leaves_the_settings_of_the_caller_alone(make_run, tmp_path):
    with matplotlib.rc_context({"font.size": 23.0}):
        loss_curves([make_run(points=3, evaluations=1)], tmp_path / "a")
        assert matplotlib.rcParams["font.size"] == 23.0


def test_moving_average_is_the_mean_of_the_window_and_keeps_straight_lines():
    assert moving_average([1.0, 2.0, 6.0], 3) == [1.0, 3.0, 6.0]
    line = [0.5 * i for i in range(20)]
    assert moving_average(line, 7) == pytest.approx(line)
    with pytest.raises(ValueError, match="odd positive"):
        moving_average(line, 4)


@pytest.mark.parametrize(("low", "high"), [(1.4, 5.6), (0.001, 0.2), (90.0, 120.0), (1.0, 1e6)])
def test_log_ticks_lie_inside_and_are_few_but_not_none(low, high):
    ticks = log_ticks(low, high)
    assert ticks
    assert all(low <= tick <= high for tick in ticks)
    assert len(ticks) <= 7


def test_labels_wrap_between_words_and_lose_no_letter():
    text = "text/a_very_long_name_of_an_experiment adamw: xsa strength=0.5"
    lines = wrapped(text, 20).split("\n")
    assert all(len(line) <= 20 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_every_variant_has_a_look_of_its_own_and_keeps_it():
    assert len({style.colour for style in VARIANT_LOOKS.values()}) == len(VARIANT_LOOKS)
    assert arm_looks({"sa": "sa", "xsa": "xsa"}) == {"sa": look("sa"), "xsa": look("xsa")}
    shades = arm_looks({f"xsa strength={s}": "xsa" for s in (0.25, 0.5, 0.75, 1)})
    assert len({(style.colour, style.line, style.marker) for style in shades.values()}) == 4
