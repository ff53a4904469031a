"""What verl imports by itself: `verl.plugins` names this module, so does the environment.

`VERL_USE_EXTERNAL_MODULES=trajreplay.capture.verl.plugin` has verl import it in every process; so
does the entry point, where trajreplay is installed. Importing it does nothing unless
`TRAJREPLAY_CAPTURE=1`.
"""

from __future__ import annotations

from trajreplay.capture.reasons import warn
from trajreplay.capture.switching.switches import Switches
from trajreplay.capture.verl.wrapping import install
from trajreplay.schema.errors import SchemaError


def start() -> None:
    """Wrap verl's registries if the environment says so.

    Raises:
        SchemaError: A switch is malformed. It is warned of as well: verl only logs that a plugin
            could not be loaded.
    """
    try:
        switches = Switches.from_env()
    except SchemaError as error:
        warn(f"nothing is captured: {error}")
        raise
    if switches is not None:
        install(switches)


start()
