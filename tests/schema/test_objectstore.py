"""A lake in an object store, on an S3 server that runs here: the same lake, the same promises."""

import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import obstore
import pytest

from tests.helpers.processes import free_port
from trajreplay import Lake, RecomputeConfig, SampleRecord
from trajreplay.schema import CaptureError, DatasetError
from trajreplay.schema.objectstore import ObjectStore

KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield _answering(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()


def _answering(endpoint: str, process: "subprocess.Popen[bytes]") -> str:
    for _ in range(600):
        assert process.poll() is None, "the S3 server ended at once"
        try:
            urllib.request.urlopen(endpoint, timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return endpoint
    raise AssertionError("the S3 server does not answer")


@pytest.fixture
def address(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in (KEYS | {"AWS_ENDPOINT": server}).items():
        monkeypatch.setenv(name, value)
    bucket = f"b-{uuid.uuid4()}"
    boto3.client("s3", endpoint_url=server).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/runs/one"


def _capture(lake: Lake, reward: float = 1.0, rank: int = 0) -> None:
    with lake.capture(
        run_id="r",
        rollout_id=3,
        rank=rank,
        expected_ranks=[0],
        settings=RecomputeConfig(n_samples_per_prompt=2, grpo_std_normalization=False),
        stages=["sample", "reward.raw", "reward.post_process", "advantage.estimate"],
    ) as capture:
        capture.samples(
            [
                SampleRecord(f"s-{i}", 2, 3, [1, 1], group_index=0, raw_reward=raw, reward=got)
                for i, (raw, got) in enumerate([(0.0, -reward), (2.0, reward)])
            ]
        )
        capture.tensor("advantages", [[-reward] * 2, [reward] * 2])


def test_a_lake_in_a_bucket_is_captured_queried_validated_and_replayed(address: str) -> None:
    _capture(Lake.create(address))
    lake = Lake.open(address)
    assert lake.sql("select sum(reward * reward) as q from rollouts").arrow()["q"].to_pylist() == [
        2
    ]
    assert lake.validate().ok
    assert lake.replay("rollout_id = 3").verdict == "pass"


def test_a_snapshot_in_a_bucket_spares_the_fetching_of_entries(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(address)
    _capture(lake)
    before = lake.info()
    assert lake.snapshot().number == 1
    fetched: list[str] = []
    read = ObjectStore.read

    def noted(store: ObjectStore, path: str, limit_bytes: int) -> bytes:
        fetched.append(path)
        return read(store, path, limit_bytes)

    monkeypatch.setattr(ObjectStore, "read", noted)
    assert Lake.open(address).info().equals(before)
    assert not [path for path in fetched if path.startswith("_manifest/entries")]
    assert lake.validate().ok


def test_a_divergence_in_a_bucket_is_found(address: str) -> None:
    lake = Lake.create(address)
    _capture(lake, reward=1.5)
    assert lake.replay().first_divergent_stage == "reward.post_process"


def test_the_same_capture_again_is_a_retry_and_another_one_is_refused(address: str) -> None:
    lake = Lake.create(address)
    _capture(lake)
    _capture(lake)
    with pytest.raises(CaptureError, match="committed with other content"):
        _capture(lake, reward=1.5)
    files = [one for one in ObjectStore(address).list("data") if one.path.endswith(".parquet")]
    assert len(files) == 1


def test_one_of_many_writers_of_a_name_wins(address: str) -> None:
    stores = [ObjectStore(address) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda at: stores[at].publish_if_absent("x", b"%d" % at), range(8)))
    assert won.count(True) == 1
    assert stores[0].read("x", 10) == b"%d" % won.index(True)


def test_a_put_repeated_after_a_lost_reply_is_a_success(address: str) -> None:
    store = ObjectStore(address)
    assert store.publish_if_absent("x", b"same")
    assert store.publish_if_absent("x", b"same")
    assert not store.publish_if_absent("x", b"other")


def test_a_store_that_ignores_conditions_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = obstore.put

    def ignoring(*args: Any, mode: str | None = None) -> object:
        del mode
        return plain(*args)

    monkeypatch.setattr(obstore, "put", ignoring)
    with pytest.raises(DatasetError, match="ignores `If-None-Match"):
        Lake.create(address)


def test_what_is_missing_or_out_of_bounds_is_named(address: str) -> None:
    store = ObjectStore(address)
    with pytest.raises(DatasetError, match=r"a/b in s3://.* is missing"):
        store.read("a/b", 10)
    with pytest.raises(DatasetError, match="leaves the lake"):
        store.read("../x", 10)
    store.publish_if_absent("x", b"four")
    with pytest.raises(DatasetError, match="has 4 bytes, expected at most 3"):
        store.read("x", 3)
    with pytest.raises(DatasetError, match="is not a lake"):
        Lake.open(address)


def test_an_address_of_no_store_is_refused() -> None:
    with pytest.raises(DatasetError, match="no object store"):
        Lake.open("nosuch://bucket/prefix")


def test_a_store_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket/prefix")
    for ask in (
        lambda: store.exists("lake.json"),
        lambda: store.read("lake.json", 10),
        lambda: list(store.list("x")),
        lambda: store.publish_if_absent("x", b""),
        lambda: Lake.open("s3://bucket/prefix"),
    ):
        with pytest.raises(DatasetError, match=r"in s3://bucket/prefix cannot be reached") as told:
            ask()
        assert "endpoint in the environment" in told.value.hint
