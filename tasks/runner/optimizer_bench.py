"""`./xsa bench optimizer`: the optimizer's share of a training step, at two sizes, as a record."""

import argparse

BATCH, LENGTH = 8, 256  # samples and tokens of each
FEW = 4  # the large model takes a quarter of the rounds: a round of it takes ten times as long


def run_optimizer(options: argparse.Namespace) -> int:
    """Measure, print the table, write the record."""
    from results.record import BenchRecord, utc_now
    from results.store import write_record
    from results.tables import Column, Table
    from tasks.bench import optimizer
    from tasks.runner.commands.bench import parse_lengths
    from tasks.runner.config.schema import LoopConfig
    from tasks.runner.device import choose_device
    from tasks.runner.paths import shown, under_root
    from tasks.runner.recording import environment
    from tasks.runner.tables import make_console, print_table

    loop = LoopConfig(max_steps=1, global_batch=1, device=options.device, threads=options.threads)
    device = choose_device(loop)
    started, rows, measured = utc_now(), [], {}
    lengths = parse_lengths(options.lengths) or [LENGTH]
    for name, sizes in optimizer.SIZES.items():
        rounds = options.rounds if name == "10 M" else max(1, options.rounds // FEW)
        for length in lengths:
            print(f"{name}, batch {BATCH} x {length}, {device.precision}, {rounds} rounds", flush=True)
            rows += optimizer.measure(sizes, BATCH, length, device.device, device.autocast, rounds)
        measured[name] = sizes
    record = BenchRecord(
        name="optimizer",
        config={"sizes": measured, "batch": BATCH, "lengths": lengths, "rounds": options.rounds},
        environment=environment(device, None, False),
        rows=rows,
        summary={f"share_{row['optimizer']}_{row['size']}_{row['tokens']}": row["share"] for row in rows},
        started_at=started,
        finished_at=max(utc_now(), started),
    )
    columns = (
        Column("size", "parameters"),
        Column("tokens", "tokens"),
        Column("optimizer", "optimizer"),
        Column("update_milliseconds", "update ms", 1),
        Column("gradient_milliseconds", "gradient ms", 1),
        Column("share", "share of the step", 3),
        Column("share_low", "95% from", 3),
        Column("share_high", "to", 3),
    )
    title = f"The optimizer's share of a training step, {device.precision}"
    print_table(make_console(), Table("optimizer", title, columns, tuple(rows)))
    print(f"record: {shown(write_record(record, under_root(options.records)))}")
    return 0
