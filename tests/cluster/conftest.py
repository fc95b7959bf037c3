from collections.abc import Iterator

import pytest

from tests.cluster.slurm_cluster import SlurmCluster, missing_parts


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes of a real Slurm, shared by all tests of the session."""
    reason = missing_parts()
    if reason:
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture
def rested(cluster: SlurmCluster) -> SlurmCluster:
    """The cluster with every node idle and every cable in."""
    for name in cluster.names:
        cluster.cable(name, up=True)
        if cluster.slurmds[name].poll() is not None:
            cluster.start_node(name)
    cluster.run("scancel", "-u", "root", check=False)
    cluster.wait(lambda: not cluster.run("squeue", "-h"), 30, "an empty queue")
    for name in cluster.names:
        if "idle" not in cluster.run("sinfo", "-h", "-n", name, "-o", "%T"):
            cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
    cluster.wait(
        lambda: cluster.run("sinfo", "-h", "-p", "gpu", "-o", "%T %D").split() == ["idle", "3"], 30, "idle nodes"
    )
    return cluster
