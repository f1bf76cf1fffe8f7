"""Which runs are compared, and that no run vanishes from the comparison unnoticed."""

import random

import pytest

from results.cells import arm_labels, group_cells
from results.effects import effects, verdict
from results.pairing import cautions, pair_records, why_not
from results.record import to_plain


def test_runs_that_differ_in_the_variant_alone_are_a_pair(make_run):
    assert why_not(make_run("sa", 1), make_run("xsa", 1)) is None


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        (None, {"seed": 5}, "different seed: 1 and 5"),
        (None, {"pair_hash": "other"}, "pair_hash"),
        (None, {"task": "vision"}, "different task"),
        ("data", {"fingerprint": "other"}, "different data fingerprint"),
        ("data", {"batches_sha256": "other"}, "order of batches"),
        ("data", {"batches_sha256": None}, "order of batches"),
        ("model", {"initial_weights_sha256": "other"}, "different initial weights"),
        ("environment", {"device": "cuda"}, "different device: cpu and cuda"),
        ("environment", {"precision": "bfloat16"}, "different precision"),
    ],
)
def test_anything_else_that_differs_forbids_the_pair_and_is_named(make_run, part, changes, reason):
    baseline, other = make_run("sa", 1), make_run("xsa", 1)
    if part is not None:
        changes = {part: to_plain(other)[part] | changes}
    assert reason in why_not(baseline, other.updated(**changes))


def test_batches_without_a_hash_are_never_taken_for_equal(make_run):
    runs = [make_run(variant, 1) for variant in ("sa", "xsa")]
    runs = [run.updated(data=to_plain(run)["data"] | {"batches_sha256": None}) for run in runs]
    assert "no hash of the batches" in why_not(*runs)


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_run_that_did_not_complete_is_in_no_pair_and_keeps_its_reason(make_run, status):
    other = make_run("xsa", 1, status=status, reason="killed")
    assert why_not(make_run("sa", 1), other) == f"{other.run_id} is {status}: killed"
    (refusal,) = pair_records([make_run("sa", 1), other]).refused
    assert "killed" in refusal.reason


def test_every_run_is_a_baseline_in_a_pair_or_refused(make_run):
    draw = random.Random(0)
    records = []
    for seed in range(4):
        records += [make_run("sa", seed), make_run("xsa", seed), make_run("head_norm", seed)]
    records.append(make_run("xsa", 77))
    records.append(make_run("xsa", 5, status="failed", reason="nan"))
    records.append(make_run("xsa", 0, optimizer="muon"))
    draw.shuffle(records)
    pairing = pair_records(records)
    named = [pair.other.run_id for pair in pairing.pairs] + [
        refusal.record.run_id for refusal in pairing.refused
    ]
    assert sorted(named) == sorted(record.run_id for record in records if record.variant != "sa")
    assert len(pairing.pairs) == 8
    assert all(pair.baseline.seed == pair.other.seed for pair in pairing.pairs)
    reasons = {refusal.record.seed: refusal.reason for refusal in pairing.refused}
    assert reasons[77] == "no sa run of text/quick with seed 77"


def test_pairing_does_not_depend_on_the_order_of_records(make_run):
    records = [make_run(variant, seed) for variant in ("sa", "xsa", "head_norm") for seed in range(3)]
    assert pair_records(records) == pair_records(records[::-1])


def test_rerun_replaces_and_never_adds_a_seed(make_run):
    early = make_run("xsa", 1)
    late = early.updated(
        run_id="again", finished_at="2025-01-01T00:00:00+00:00", metrics={"validation_bits_per_byte": 2.0}
    )
    pairing = pair_records([make_run("sa", 1), late, early])
    assert [pair.other.run_id for pair in pairing.pairs] == ["again"]
    assert [refusal.reason for refusal in pairing.refused] == ["superseded by again"]


def test_completed_run_goes_before_a_later_failure(make_run):
    good = make_run("xsa", 1)
    bad = good.updated(run_id="bad", status="failed", reason="x", finished_at="2025-01-01T00:00:00+00:00")
    assert [pair.other for pair in pair_records([make_run("sa", 1), bad, good]).pairs] == [good]


def test_two_baselines_that_fit_are_not_chosen_between(make_run):
    baseline = make_run("sa", 1)
    twin = baseline.updated(run_id="twin", config_hash="twin")
    (refusal,) = pair_records([baseline, twin, make_run("xsa", 1)]).refused
    assert "more than one baseline fits" in refusal.reason


def test_differences_that_do_not_forbid_a_pair_are_reported(make_run):
    baseline, other = make_run("sa", 1), make_run("xsa", 1)
    assert cautions(baseline, other) == ()
    environment = to_plain(other)["environment"]
    environment |= {"git_commit": "fedcba9876543210", "threads": 8, "versions": {"torch": "2.11.0"}}
    found = " ".join(cautions(baseline, other.updated(environment=environment)))
    assert "different commits" in found
    assert "versions of numpy, torch" in found
    assert "threads: 2 and 8" in found


def test_labels_name_only_what_differs(make_run):
    records = [
        make_run("sa"),
        make_run("xsa"),
        make_run("xsa", attention={"strength": 0.5}),
        make_run("xsa", 1, attention={"backend": "fused"}),
        make_run("sa", loop={"max_steps": 50}),
        make_run("sa", optimizer="muon"),
    ]
    assert sorted(set(arm_labels(records).values())) == ["sa", "xsa strength=0.5", "xsa strength=1"]
    labels = [cell.label for cell in group_cells(records)]
    assert labels == ["text/quick adamw max_steps=50", "text/quick adamw max_steps=600", "text/quick muon"]


def test_one_cell_holds_all_seeds_and_arms_but_not_other_arithmetic(make_run):
    records = [make_run(variant, seed) for variant in ("sa", "xsa") for seed in (0, 1)]
    half = make_run("sa", 2)
    half = half.updated(environment=to_plain(half)["environment"] | {"precision": "bfloat16"})
    sizes = {cell.label: len(cell.records) for cell in group_cells([*records, half])}
    assert sizes == {"text/quick adamw precision=float32": 4, "text/quick adamw precision=bfloat16": 1}


def test_effect_is_the_mean_of_the_paired_differences(make_run):
    def at(variant, seed, value):
        return make_run(variant, seed, metrics={"validation_bits_per_byte": value})

    records = [at("sa", 0, 2.0), at("sa", 1, 3.0), at("xsa", 0, 1.9), at("xsa", 1, 2.7), at("xsa", 2, 0.0)]
    (effect,) = effects(records)
    assert effect.differences == pytest.approx({0: -0.1, 1: -0.3})
    assert effect.summary.mean == pytest.approx(-0.2)
    assert effect.baseline_mean == pytest.approx(2.5)
    assert verdict(effect) == "no difference shown"


def test_diverged_seed_is_left_out_and_named(make_run):
    sick = make_run("xsa", 1, metrics={"validation_bits_per_byte": float("inf")})
    (effect,) = effects([make_run("sa", 0), make_run("sa", 1), make_run("xsa", 0), sick])
    assert list(effect.differences) == [0]
    assert any("seed 1 has no finite" in note for note in effect.notes)


def test_arm_that_one_cell_lacks_is_there_as_missing(make_run):
    records = [make_run("sa", 0), make_run("xsa", 0), make_run("sa", 0, optimizer="muon")]
    found = {effect.cell.optimizer: effect for effect in effects(records)}
    assert found["muon"].summary is None
    assert verdict(found["muon"]) == "missing"
    assert found["adamw"].summary.n == 1


def test_verdict_claims_nothing_that_the_interval_does_not_carry(make_run):
    def grid(spread, arms=1):
        draw = random.Random(1)
        records = [make_run("sa", seed, metrics={"validation_bits_per_byte": 2.0}) for seed in range(5)]
        for arm in range(arms):
            attention = {"strength": 0.1 * (arm + 1)}
            for seed in range(5):
                value = 1.99 + draw.gauss(0.0, spread)
                metrics = {"validation_bits_per_byte": value}
                records.append(make_run("xsa", seed, attention=attention, metrics=metrics))
        return effects(records)

    assert verdict(grid(0.001)[0]) == "better"
    assert verdict(grid(1.0)[0]) == "no difference shown"
    many = grid(0.006, arms=12)
    shy = [effect for effect in many if effect.summary.p <= 0.05 < effect.holm_p]
    assert shy
    assert all(verdict(effect) == "better, but not after Holm correction" for effect in shy)
