"""What several tests of gates look at."""

import pytest

from tests.helpers.gates import healthy_run
from trajreplay import Lake
from trajreplay.query import Catalog
from trajreplay.schema.lakefile import open_lake


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A healthy run of one step."""
    lake = Lake.create(tmp_path_factory.mktemp("gate") / "lake")
    healthy_run(lake, 1)
    return Catalog.open(open_lake(lake.path))
