"""The two programs beside this one, in the same two processes."""

import socket
import tempfile

import data_parallel
import tensor_parallel
import torch.multiprocessing as mp


def run(rank, world, ports, folder):
    tensor_parallel.run(rank, world, ports[0], folder)
    data_parallel.run(rank, world, ports[1])


if __name__ == "__main__":
    with socket.socket() as a, socket.socket() as b:
        for s in (a, b):
            s.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (a, b)]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (2, ports, folder), nprocs=2)
    print("done")
