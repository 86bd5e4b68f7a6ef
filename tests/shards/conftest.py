"""One Ray cluster on this machine for all tests of this package."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")


@pytest.fixture(scope="package")  # A cluster uses a part of a core as long as it exists.
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    token = tmp_path_factory.mktemp("token") / "auth_token"
    token.touch(0o600)
    token.write_text("a" * 40)
    source = str(Path(__file__).parents[2] / "src")
    # Every process of Ray imports requests, which imports chardet if it can. That takes a tenth of the start.
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "chardet.py").write_text("raise ImportError")
    settings = {
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([source, str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
    }
    before = {name: os.environ.get(name) for name in (*settings, "RAY_AUTH_MODE")}  # `ray.init` sets the last one.
    os.environ.update(settings)
    ray.shutdown()  # A test may have started a cluster by a call of Ray.
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        configure_logging=False,
        object_store_memory=128 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
