"""Questions to a SuperLink's control interface, which answers on the server's host alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedgft.deploy.folder import Folder


@contextmanager
def control_client(folder: Folder) -> Iterator[Any]:
    """Flower's client for the control interface of this federation's SuperLink."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        f"127.0.0.1:{folder.inner}",
        insecure=False,
        root_certificates=(folder.path / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    finally:
        client.close()


def register_nodes(folder: Folder, keys: dict[bytes, str]) -> tuple[dict[str, str], list[bytes]]:
    """Register every key that the SuperLink does not know.

    Returns {node: site} of all keys, and the keys that were new.
    """
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest

    new = []
    with control_client(folder) as client:
        nodes = {n.public_key: n.node_id for n in client.ListNodes(ListNodesRequest()).nodes_info}
        for key, name in keys.items():
            if key not in nodes:
                made = client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                nodes[key] = made.node_id
                new.append(key)
    return {str(nodes[key]): name for key, name in keys.items()}, new


def status_of(folder: Folder, run: int) -> str:
    """Such as "running" or "finished:completed"; the exit code of `flwr run` says nothing."""
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest

    try:
        with control_client(folder) as client:
            found = client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
    except httpx.HTTPError:  # a busy machine is no reason to give up; the deadline is
        return "unknown"
    return f"{found.status}:{found.sub_status}" if found.sub_status else found.status
