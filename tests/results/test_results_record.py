"""The schema of records: strict, versioned, consistent; and files of records."""

import math

import numpy
import pytest

from results.record import SCHEMA_VERSION, RunRecord, parse_record, to_plain
from results.store import load_records, read_record, write_record


def test_record_survives_writing_and_reading_exactly(make_run, tmp_path):
    record = make_run("xsa", 3, extra={"note": [1, 2.5, None, {"deep": True}]})
    assert read_record(write_record(record, tmp_path)) == record


def test_benchmark_survives_writing_and_reading_exactly(make_bench, tmp_path):
    record = make_bench()
    assert read_record(write_record(record, tmp_path)) == record


def test_nan_and_infinity_survive_and_stand_explicitly_in_the_file(make_run, tmp_path):
    curves = {"train": {"step": [1, 2, 3], "loss": [5.5, math.inf, math.nan]}}
    record = make_run(
        status="failed",
        reason="loss is nan at step 3",
        curves=curves,
        metrics={"validation_loss": -math.inf},
        primary_metric=None,
    )
    path = write_record(record, tmp_path)
    assert '{"$float": "nan"}' in path.read_text()
    back = read_record(path)
    assert back.curves["train"]["loss"][:2] == [5.5, math.inf]
    assert math.isnan(back.curves["train"]["loss"][2])
    assert back.metrics["validation_loss"] == -math.inf


def test_same_record_gives_the_same_bytes_whatever_the_order_of_its_dictionaries(make_run, tmp_path):
    record = make_run()
    turned = to_plain(record)
    for name in ("config", "metrics", "extra"):
        turned[name] = dict(reversed(turned[name].items()))
    turned["environment"]["versions"] = dict(reversed(turned["environment"]["versions"].items()))
    first = write_record(record, tmp_path / "a").read_bytes()
    second = write_record(parse_record(turned), tmp_path / "b").read_bytes()
    assert first == second


def test_numpy_numbers_are_kept_as_plain_ones(make_run):
    record = make_run(
        extra={"value": numpy.float64(0.1)},
        metrics={"validation_loss": numpy.float64(1.5)},
        primary_metric=None,
    )
    assert type(to_plain(record)["extra"]["value"]) is float


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seeed": 1}, "seeed: unknown key; did you mean 'seed'"),
        ({"unheard_of_thing": 1}, "put fields of your own into 'extra'"),
        ({"seed": "3"}, "seed: .*integer, got '3'"),
        ({"seed": True}, "seed: .*integer"),
        ({"metrics": {"validation_loss": "1.4"}}, "metrics.validation_loss"),
        ({"status": "done"}, "status: .*'completed'"),
        ({"status": "failed"}, "needs a reason"),
        ({"status": "interrupted", "reason": ""}, "needs a reason"),
        ({"finished_at": None}, "completed run needs finished_at"),
        ({"model": None, "data": None}, "completed run needs model, data"),
        ({"primary_metric": "validation_accuracy"}, "not among the metrics"),
        ({"started_at": "2024-01-02T03:04:05"}, "not in UTC"),
        ({"started_at": "2024-01-02T03:04:05+02:00"}, "not in UTC"),
        ({"started_at": "yesterday"}, "not an ISO 8601 time"),
        ({"finished_at": "2023-01-02T03:04:05+00:00"}, "lies before started_at"),
        ({"run_id": "../escape"}, "run_id"),
        ({"run_id": ".hidden"}, "run_id"),
        ({"peak_memory_bytes": -1}, "peak_memory_bytes"),
        ({"curves": {"train": {"step": [1, 2], "loss": [1.0]}}}, "loss has 1 values for 2 steps"),
        ({"curves": {"train": {"step": [2, 2], "loss": [1.0, 1.0]}}}, "step must increase"),
        ({"curves": {"train": {"loss": [1.0]}}}, "curves.train.step: missing"),
        ({"config": {"path": {1, 2}}}, "config: path: set has no JSON form"),
        ({"extra": {1: 2}}, "expected str"),
    ],
)
def test_record_that_does_not_fit_the_schema_is_refused_in_one_line(make_run, changes, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_record(to_plain(make_run()) | changes)
    assert "\n" not in str(caught.value)


def test_updated_record_is_checked_and_the_old_one_unchanged(make_run):
    running = make_run(status="running", finished_at=None)
    failed = running.updated(status="failed", reason="disk full")
    assert (running.status, failed.status, failed.reason) == ("running", "failed", "disk full")
    assert failed.model == running.model
    with pytest.raises(ValueError, match="needs a reason"):
        running.updated(status="failed")
    with pytest.raises(ValueError, match="did you mean 'status'"):
        running.updated(statuss="failed")


def test_record_cannot_be_changed_in_place(make_run):
    with pytest.raises(ValueError, match="frozen"):
        make_run().status = "running"


def test_record_spoilt_through_its_lists_is_not_written(make_run, tmp_path):
    record = make_run()
    record.curves["train"].step.append(10**6)
    with pytest.raises(ValueError, match="for 61 steps; give one each"):
        write_record(record, tmp_path)
    assert not list(tmp_path.iterdir())


def test_benchmarks_of_other_shapes_or_machines_get_files_of_their_own(make_bench):
    environment = to_plain(make_bench())["environment"]
    names = {
        make_bench().file_name,
        make_bench(config={"shape": {"batch": 8, "heads": 8}}).file_name,
        make_bench(environment=environment | {"device": "cuda", "device_name": "made-up GPU"}).file_name,
        make_bench(name="step").file_name,
    }
    assert len(names) == 4
    assert make_bench(rows=[]).file_name == make_bench().file_name


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a whole JSON file"),
        (b'{"schema_version": 1, "kind": "tra', "not a whole JSON file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[1, 2]", "not a record"),
        (b'{"name": "someone else\'s file"}', "not a record"),
        (b'{"schema_version": 1, "kind": "poem"}', "unknown kind 'poem'; known kinds: train, bench"),
        (b'{"schema_version": 1, "kind": ["train"]}', "unknown kind"),
        (b'{"schema_version": 0, "kind": "bench"}', "schema_version"),
        (b'{"schema_version": true, "kind": "bench"}', "schema_version"),
    ],
)
def test_broken_or_foreign_file_is_an_error_that_names_it(tmp_path, content, complaint):
    path = tmp_path / "strange.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_records(tmp_path)
    assert "strange.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_record_is_refused_at_every_length(make_run, tmp_path):
    path = write_record(make_run(points=2, evaluations=1), tmp_path)
    whole = path.read_bytes()
    # The last byte is the newline after the closing brace: without it the record is still whole.
    for length in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a whole JSON file"):
            read_record(path)


def test_newer_schema_says_so(make_run, tmp_path):
    path = write_record(make_run(), tmp_path)
    newer = SCHEMA_VERSION + 1
    path.write_text(path.read_text().replace('"schema_version": 1', f'"schema_version": {newer}'))
    with pytest.raises(
        ValueError, match=f"schema version {newer}, this program reads up to {SCHEMA_VERSION}"
    ):
        read_record(path)


def test_records_load_in_an_order_that_depends_on_names_alone(make_run, tmp_path):
    for seed in (2, 0, 1):
        write_record(make_run(seed=seed), tmp_path / "part")
    write_record(make_run("xsa", 0), tmp_path)
    (tmp_path / ".half.json.tmp").write_text("{")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.json").write_text("{")
    records = load_records(tmp_path)
    assert [(record.variant, record.seed) for record in records] == [
        ("sa", 0),
        ("sa", 1),
        ("sa", 2),
        ("xsa", 0),
    ]


def test_one_run_in_two_files_is_an_error(make_run, tmp_path):
    write_record(make_run(), tmp_path / "a")
    write_record(make_run(), tmp_path / "b")
    with pytest.raises(ValueError, match="is also in"):
        load_records(tmp_path)


def test_absent_directory_and_absent_file_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no such directory of records"):
        load_records(tmp_path / "none")
    with pytest.raises(ValueError, match="no such record"):
        read_record(tmp_path / "none.json")


def test_writing_again_replaces_the_record_of_the_same_run(make_run, tmp_path):
    write_record(make_run(status="running", finished_at=None), tmp_path)
    write_record(make_run(), tmp_path)
    (record,) = load_records(tmp_path)
    assert isinstance(record, RunRecord)
    assert record.status == "completed"
