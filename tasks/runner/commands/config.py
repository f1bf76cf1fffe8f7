"""Print the resolved config of an experiment and its hash: ./xsa config EXPERIMENT [KEY=VALUE ...]

Without an experiment: the experiments and config groups there are.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take an experiment and overrides, or nothing."""
    parser.add_argument("experiment", nargs="?", help="for instance text/quick")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for instance attention=sa seed=3")


def run(options: argparse.Namespace) -> int:
    """Print YAML that says everything, with the hash as a comment."""
    import yaml

    from tasks.runner.config.compose import experiments, groups, load_config
    from tasks.runner.config.compose import options as group_options

    if options.experiment is None:
        print("experiments: " + ", ".join(experiments()))
        for group in groups():
            print(f"{group}: " + ", ".join(group_options(group)))
        return 0
    config = load_config(options.experiment, options.overrides)
    print(f"# run {config.run_id()}, config hash {config.config_hash()}")
    print(yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True), end="")
    return 0
