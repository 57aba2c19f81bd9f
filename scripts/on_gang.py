"""Scripts that measure something on a gang of workers: flags in, the workers' results out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from moe_ep.errors import ConfigError, MoeEpError
from moe_ep.launch.cli.gang_options import GangConfig, start_gang
from moe_ep.launch.cli.options import OptionError, Parser, add_flags, from_args

C = TypeVar("C", bound=GangConfig)


def measure_on_gang(
    script: str, description: str, config_type: type[C], measure: Callable[..., Any]
) -> tuple[C, list[Any] | None]:
    """(settings, what `measure(rank_env, config)` returned on each rank; None on workers that are not the driver).

    Raises:
        SystemExit: 2 for a wrong option, 1 for a gang that failed; after one message that says why.
    """
    parser = Parser(prog=script, description=description.split("\n")[0])
    add_flags(parser, config_type)
    args = parser.parse_args()
    try:
        config, gang = start_gang(from_args(config_type, args))
        try:
            results = gang.run(measure, config)
        finally:
            gang.close()
    except (OptionError, MoeEpError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, (OptionError, ConfigError)) else 1) from None
    return config, results if gang.is_driver else None
