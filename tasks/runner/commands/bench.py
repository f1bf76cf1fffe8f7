"""Measure, side by side in one process, and keep a record.

  ./xsa bench attention                 the operator: plain, two lines (eager, compiled), fused
  ./xsa bench attention --what target   only the shapes the targets are stated for
  ./xsa bench step                      a whole training step of a 10 M-parameter GPT
  ./xsa bench optimizer                 the share of a training step that each optimizer takes
  ./xsa bench eval                      documents a second of ./xsa eval, against one request after another
  ./xsa bench data                      MB/s of ./xsa data prepare, against datasets.map with tiktoken
  ./xsa bench gpu                       all that needs a GPU, checks first, in at most eight minutes
  --device cuda                         the first two on a GPU, with CUDA events and allocated memory

Times are medians over rounds in which every candidate runs once; ratios are taken within a round.
Leave the machine alone meanwhile.
"""

import argparse

NAMES = ("attention", "step", "optimizer", "eval", "data", "gpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what to measure, where, and how often."""
    parser.add_argument("name", choices=NAMES, help="what to measure")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of every comparison (default: 25)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument(
        "--what", choices=["target", "sweep", "all"], default="all", help="which shapes (attention)"
    )
    parser.add_argument(
        "--lengths", default=None, help="sequence lengths of the sweep, as 512,1024 (default: by device)"
    )
    parser.add_argument("--megabytes", type=int, default=100, help="text of a round (data; default: 100)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument(
        "--records", default="results/runs", help="directory of records (default: results/runs)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, write the record."""
    from tasks.errors import UserError

    if options.rounds < 1:
        raise UserError(f"--rounds: expected at least 1, got {options.rounds}")
    lengths = parse_lengths(options.lengths)
    if options.name == "gpu":
        return run_gpu(options)
    if options.name == "eval":
        return run_eval(options)
    if options.name == "optimizer":
        from tasks.runner.optimizer_bench import run_optimizer

        return run_optimizer(options)
    if options.name == "data":
        return run_data(options)

    from results.record import BenchRecord, utc_now
    from results.store import write_record
    from tasks.runner.config.schema import LoopConfig
    from tasks.runner.device import choose_device
    from tasks.runner.paths import shown, under_root
    from tasks.runner.recording import environment
    from tasks.runner.tables import make_console

    device = choose_device(
        LoopConfig(max_steps=1, global_batch=1, device=options.device, threads=options.threads)
    )
    started = utc_now()
    config, rows = MEASURES[options.name](options, lengths, device)
    record = BenchRecord(
        name=options.name,
        config=config,
        environment=environment(device, None, not options.no_compile),
        rows=rows,
        summary=summary(rows),
        started_at=started,
        finished_at=max(utc_now(), started),
    )
    print_rows(make_console(), record)
    print(f"record: {shown(write_record(record, under_root(options.records)))}")
    return 0


def run_gpu(options: argparse.Namespace) -> int:
    """Run the GPU script on the first CUDA device and keep its record."""
    from results.record import parse_record
    from results.store import write_record
    from tasks.bench import gpu
    from tasks.runner.device import resolve_device
    from tasks.runner.paths import shown, under_root

    device = resolve_device("cuda" if options.device == "cpu" else options.device, 0)
    try:
        record = parse_record(gpu.record(device, gpu.MINUTES, small=False))
    except gpu.WrongKernelError as error:
        print(f"xsa: {error}; nothing was measured")
        return 1
    for name, value in record.summary.items():
        print(f"{name}: {value:.6g}")
    print(f"record: {shown(write_record(record, under_root(options.records)))}")
    return 0


def run_data(options: argparse.Namespace) -> int:
    """Measure the preparation of text on the embedded corpus, print the table, write the record."""
    import os

    from results.record import BenchRecord, utc_now
    from results.store import write_record
    from results.tables import Column, Table
    from tasks.bench import data
    from tasks.errors import UserError
    from tasks.runner.config.schema import LoopConfig
    from tasks.runner.device import choose_device
    from tasks.runner.paths import shown, under_root
    from tasks.runner.recording import environment
    from tasks.runner.tables import make_console, print_table
    from tasks.text.corpus import build_embedded_corpus

    if options.megabytes < 1:
        raise UserError(f"--megabytes: expected at least 1, got {options.megabytes}")
    device = choose_device(
        LoopConfig(max_steps=1, global_batch=1, device="cpu", threads=1, precision="float32")
    )
    started = utc_now()
    config = {
        "megabytes": options.megabytes,
        "workers": options.threads or len(os.sched_getaffinity(0)),
        "rounds": options.rounds,
    }
    rows = data.measure(build_embedded_corpus().train.tobytes(), **config)
    record = BenchRecord(
        name="data",
        config=config,
        environment=environment(device, None, False),
        rows=rows,
        summary={"speed_over_nanogpt": next(row["speed_ratio"] for row in rows if row["way"] == "suite")},
        started_at=started,
        finished_at=max(utc_now(), started),
    )
    columns = (
        Column("way", "way"),
        Column("megabytes_per_second", "MB/s", 1),
        Column("speed_ratio", "speed, nanoGPT = 1", 2),
        Column("ratio_low", "95% from", 2),
        Column("ratio_high", "to", 2),
    )
    title = f"{options.megabytes} MB of text, {config['workers']} processes"
    print_table(make_console(), Table("data", title, columns, tuple(rows)))
    print(f"record: {shown(write_record(record, under_root(options.records)))}")
    return 0


def run_eval(options: argparse.Namespace) -> int:
    """Measure downstream evaluation with a byte and a GPT-2 vocabulary, print the table, write the record."""
    from results.record import BenchRecord, utc_now
    from results.store import write_record
    from results.tables import Column, Table
    from tasks.bench import evaluation
    from tasks.runner.config.schema import LoopConfig
    from tasks.runner.device import choose_device
    from tasks.runner.paths import shown, under_root
    from tasks.runner.recording import environment
    from tasks.runner.tables import make_console, print_table

    loop = LoopConfig(
        max_steps=1, global_batch=1, device=options.device, threads=options.threads, precision="float32"
    )
    device = choose_device(loop)
    started, config, rows = utc_now(), {"documents": 64, "rounds": options.rounds}, []
    for vocabulary in (256, 50257):
        print(f"vocabulary {vocabulary}", flush=True)
        rows += evaluation.measure(vocabulary, config["documents"], device.device, options.rounds)
    record = BenchRecord(
        name="eval",
        config=config,
        environment=environment(device, None, False),
        rows=rows,
        summary={f"speedup_vocabulary_{row['vocabulary']}": row["speedup"] for row in rows},
        started_at=started,
        finished_at=max(utc_now(), started),
    )
    columns = (
        Column("adapter", "adapter"),
        Column("vocabulary", "vocabulary"),
        Column("documents_per_second", "documents/s", 1),
        Column("speedup", "speed-up", 2),
        Column("speedup_low", "95% from", 2),
        Column("speedup_high", "to", 2),
    )
    print_table(make_console(), Table("eval", "Downstream evaluation", columns, tuple(record.rows)))
    print(f"record: {shown(write_record(record, under_root(options.records)))}")
    return 0


def print_rows(console, record) -> None:
    """Print the rows for people: what was measured, time, ratio to plain with its interval, memory."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("attention", no_wrap=True)
    for title in ("ms", "ratio to plain (95%)", "saved MB", "peak MB, about"):
        table.add_column(title, justify="right", no_wrap=True)
    before = None
    for row in record.rows:
        what = describe(row)
        if before not in (None, what):
            table.add_section()
        # Fewer than six rounds give no 95% interval of a median.
        interval = f" ({row['ratio_low']:.3f}..{row['ratio_high']:.3f})" if row["rounds"] >= 6 else ""
        ratio = f"{row['ratio']:.3f}{interval}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"
        saved = f"{row['saved_bytes'] / 1e6:.2f}"
        table.add_row(
            "" if what == before else what, row["attention"], f"{row['milliseconds']:.2f}", ratio, saved, peak
        )
        before = what
    console.print(table)
    for name, value in record.summary.items():
        console.print(f"{name.replace('_', ' ')}: {value:.3f}")


def describe(row: dict) -> str:
    """Return a short name of a row's shape."""
    if "heads" in row:
        sizes = f"B {row['batch']}, T {row['length']}, H {row['heads']}, D {row['head_dim']}"
        return f"{sizes}, {row['dtype']}"
    return f"{row['model']}, batch {row['batch']} x {row['length']}, {row['precision']}"


def parse_lengths(text: str | None) -> list[int] | None:
    """Return the lengths of `512,1024`, None for the default."""
    from tasks.errors import UserError

    if text is None:
        return None
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f"--lengths: expected whole numbers such as 512,1024, got '{text}'")
    return lengths


def measure_attention(options, lengths, device) -> tuple[dict, list[dict]]:
    """Measure the operator over the chosen shapes."""
    from tasks.bench import attention

    gpu = device.device.type == "cuda"
    lengths = lengths or ([512, 1024, 2048, 4096, 8192, 16384] if gpu else [512, 1024, 2048, 4096])
    tokens, batch = (65536, 4) if gpu else (4096, 1)
    shapes = []
    if options.what in {"target", "all"}:
        shapes += attention.target_shapes()
    if options.what in {"sweep", "all"}:
        shapes += attention.sweep_shapes(lengths, tokens, batch, [4, 8, 16])
    rows = []
    for number, shape in enumerate(shapes, start=1):
        print(f"{number}/{len(shapes)}: {shape}", flush=True)
        # Compiled functions are specialised to a shape: they are made anew for each.
        found = attention.candidates(not options.no_compile)
        rows += attention.measure(shape, device.device, options.rounds, found)
    config = {
        "rounds": options.rounds,
        "what": options.what,
        "lengths": lengths,
        "tokens": tokens,
        "batch": batch,
    }
    return config, rows


def measure_step(options, lengths, device) -> tuple[dict, list[dict]]:
    """Measure the training step of a 10 M-parameter GPT in both precisions."""
    from tasks.bench import step

    batch, config, rows = 8, {"rounds": options.rounds}, []
    for length in lengths or [256, 1024]:
        sizes = {"vocab_size": 256, "n_layers": 6, "n_heads": 6, "d_model": 384, "max_seq_len": length}
        per_step = max(1, batch * 256 // length)
        for precision in ("float32", "bfloat16"):
            print(f"length {length}, batch {per_step}, {precision}", flush=True)
            rows += step.measure(sizes, per_step, precision, device.device, options.rounds)
        config[f"sizes_{length}"] = {**sizes, "batch": per_step}
    return config, rows


def summary(rows: list[dict]) -> dict:
    """Return what people ask for first: the fused operator's worst and median ratio to plain, and to torch's
    own attention where that was measured: `plain` is this library's path to the same kernel."""
    from statistics import median

    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["attention"], []).append(row["ratio"])
    found = {
        "fused_over_plain_median": median(ratios["fused"]),
        "fused_over_plain_worst": max(ratios["fused"]),
        "two_lines_over_plain_median": median(ratios["two lines"]),
    }
    if "torch" in ratios:
        pairs = zip(ratios["fused"], ratios["torch"], strict=True)
        found["fused_over_torch_median"] = median(fused / torch for fused, torch in pairs)
    return found


MEASURES = {"attention": measure_attention, "step": measure_step}
