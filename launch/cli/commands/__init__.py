"""The subcommands of moe-ep, one module each, with `add_parser(subparsers)` and `main(args) -> exit code`."""
