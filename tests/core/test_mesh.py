"""DeviceMesh: names, signatures and errors of torch's, plus communicators and meshes in any order of ranks."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.gloo_ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor.comm.pending import Pending
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh, init_device_mesh
from dtensor.mesh.layout import axis_digit, axis_offsets, coalesce, overlap, row_major, split_axis
from dtensor.simulate import fake_world, simulate

ABC = ("a", "b", "c")


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=ABC)


def in_world(size: int, rank: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Run a test as `rank` of a fake world."""

    def decorate(test: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with fake_world(size, rank=rank):
                test()

        run.__name__ = test.__name__
        return run

    return decorate


# the arithmetic of axes


def test_axes() -> None:
    a, b, c = row_major((2, 3, 4))
    assert (a, b, c) == (((2, 12),), ((3, 4),), ((4, 1),))
    assert coalesce([*a, *b]) == ((6, 4),) and coalesce([*a, *c]) == ((2, 12), (4, 1))
    assert coalesce([(1, 7), (4, 1), (1, 3)]) == ((4, 1),) and coalesce([(1, 5)]) == ((1, 5),)
    assert axis_offsets(((2, 12), (4, 1))).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert axis_digit(((2, 12), (4, 1)), 23) == 7 and axis_digit(((2, 12), (4, 1)), 14) == 6
    assert overlap([a, ((2, 12), (4, 1))]) and not overlap([a, b, c]) and overlap([((6, 4),), b])
    assert not overlap([((1, 3),), b, ((1, 4),)])


@pytest.mark.parametrize(
    "axis, sizes, expected",
    [
        (((8, 2),), (2, 4), (((2, 8),), ((4, 2),))),
        (((8, 2),), (2, 2, 2), (((2, 8),), ((2, 4),), ((2, 2),))),
        (((2, 12), (4, 1)), (2, 4), (((2, 12),), ((4, 1),))),
        (((2, 12), (4, 1)), (4, 2), (((2, 12), (2, 2)), ((2, 1),))),
        (((2, 12), (4, 1)), (1, 8), (((1, 24),), ((2, 12), (4, 1)))),
        (((6, 1),), (4, 2), None),
        (((3, 8), (4, 1)), (2, 6), None),
    ],
)
def test_split_axis(axis: object, sizes: tuple[int, ...], expected: object) -> None:
    assert split_axis(axis, sizes) == expected  # type: ignore[arg-type]


# what it is


@in_world(8, 5)
def test_attributes() -> None:
    mesh = cube()
    assert mesh.shape == (2, 2, 2) and mesh.ndim == 3 and mesh.size() == 8 and mesh.size(1) == 2
    assert mesh.coord == mesh.get_coordinate() == (1, 0, 1) and mesh.get_rank() == 5
    assert mesh.device_type == "cpu" and mesh.mesh_dim_names == ABC
    assert mesh.mesh.dtype == torch.int32 and torch.equal(mesh.mesh, torch.arange(8).view(2, 2, 2).int())
    assert [mesh.get_local_rank(n) for n in ABC] == [1, 0, 1] == [mesh.get_local_rank(i) for i in range(3)]
    assert [mesh.axis_of(n) for n in ABC] == [0, 1, 2] and mesh.axis_of(-1) == 2
    assert [mesh.axis_name(i) for i in (0, 2)] == ["a", "c"] and init_device_mesh("cpu", (2, 4)).axis_name(1) == "1"
    with pytest.raises(AttributeError):
        mesh.device_type = "cuda"  # type: ignore[misc]
    for call in (mesh.get_local_rank, mesh.get_group):
        with pytest.raises(RuntimeError, match="needs to know which"):
            call()
        with pytest.raises(KeyError, match="does not exist"):
            call("d")
        with pytest.raises(IndexError):
            call(3)
    with pytest.raises(IndexError):
        mesh.size(3)
    with pytest.raises(KeyError):
        init_device_mesh("cpu", (2, 4)).axis_of("a")


@in_world(8, 5)
def test_ways_to_give_the_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    array = np.arange(8).reshape(2, 4)
    for ranks in (array.tolist(), array, torch.tensor(array), torch.tensor(array.T.copy()).t(), array.astype(np.uint8)):
        assert DeviceMesh("cpu", ranks) == mesh and hash(DeviceMesh("cpu", ranks)) == hash(mesh)
    assert DeviceMesh("cpu", range(8)).shape == (8,)
    point = DeviceMesh("cpu", 5)
    assert point.shape == () and point.ndim == 0 and point.coord == () and point.size() == 1 and point.mesh.ndim == 0
    assert DeviceMesh("cpu", 4).coord is None


def test_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert repr(mesh) == "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))"
        assert repr(init_device_mesh("cpu", (2, 4))) == "DeviceMesh((2, 4), 'cpu', stride=(4, 1))"
        assert repr(cube()["a", "c"]._flatten()) == "DeviceMesh((a_c=4), 'cpu', stride=((4, 1),))"
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        assert repr(mesh["tp"]) == "DeviceMesh((tp=4), 'cpu', stride=(1,), Mesh: [0, 1, 2, 3])"


@in_world(8, 0)
def test_refused_meshes() -> None:
    for error, match, call in [
        (TypeError, "needs the ranks", lambda: DeviceMesh("cpu")),
        (TypeError, "integer", lambda: DeviceMesh("cpu", [0.5, 1.0])),
        (ValueError, "twice", lambda: DeviceMesh("cpu", [0, 1, 1])),
        (RuntimeError, "bigger than default world size 8", lambda: init_device_mesh("cpu", (3, 3))),
        (RuntimeError, "unique", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "x"))),
        (RuntimeError, "unique", lambda: DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("x", "x"))),
        (RuntimeError, "same length", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("x",))),
        (ValueError, "names 1 dimensions", lambda: DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("x",))),
        (RuntimeError, "with index", lambda: init_device_mesh("cuda:0", (2,))),
        (RuntimeError, "invalid keys", lambda: init_device_mesh("cpu", (2,), backend_override={1: "gloo"})),
        (
            RuntimeError,
            "redundant",
            lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("x",), backend_override={0: "gloo", "x": "gloo"}),
        ),
        (ValueError, "backend_override has 1", lambda: DeviceMesh("cpu", [[0]], backend_override=((None, None),))),
    ]:
        with pytest.raises(error, match=match):
            call()


# parts of it


@in_world(8, 5)
def test_slices() -> None:
    mesh = cube()
    assert mesh["a"].mesh.tolist() == [1, 5] and mesh["c"].mesh.tolist() == [4, 5]
    assert mesh["a", "c"].mesh.tolist() == [[0, 1], [4, 5]] and mesh["a", "c"].coord == (1, 1)
    assert mesh["a", "c"]["c"] == mesh["c"] and hash(mesh["a", "c"]["c"]) == hash(mesh["c"])
    assert mesh[ABC] is mesh and mesh[list(ABC)] is mesh and mesh[["a", "b"]] == mesh["a", "b"]
    assert mesh["a"].get_local_rank() == 1 and mesh["a"].mesh_dim_names == ("a",)
    assert mesh["a"] != mesh["b"] and mesh["a"] != DeviceMesh("cpu", [1, 5], mesh_dim_names=("a",))
    for error, match, call in [
        (KeyError, "Invalid mesh_dim_names", lambda: mesh["d"]),
        (KeyError, "Invalid mesh_dim_names", lambda: mesh["a"]["b"]),
        (KeyError, "ascending", lambda: mesh["c", "a"]),
        (KeyError, "Invalid", lambda: mesh[()]),
        (TypeError, "sliced by the names", lambda: mesh[0]),
        (RuntimeError, "without mesh_dim_names", lambda: init_device_mesh("cpu", (8,))["a"]),
    ]:
        with pytest.raises(error, match=match):
            call()


@in_world(8, 5)
def test_flatten() -> None:
    mesh = cube()
    flat = mesh["a", "c"]._flatten()
    assert flat.mesh.tolist() == [0, 1, 4, 5] and flat.mesh_dim_names == ("a_c",) and flat.coord == (3,)
    assert mesh["a", "c"]._flatten() is flat and mesh["a", "b"].flatten("ab").mesh.tolist() == [1, 3, 5, 7]
    assert mesh["a"]._flatten() == mesh["a"] and mesh._flatten("all").coord == (5,)
    with pytest.warns(FutureWarning, match="_flatten"):
        assert mesh["a_c"] == flat
    with pytest.warns(FutureWarning):
        assert mesh["ab", "c"].mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.warns(FutureWarning), pytest.raises(RuntimeError, match="overlapping"):
        mesh["ab", "b"]
    for error, match, call in [
        (ValueError, "another name", lambda: mesh["a", "b"]._flatten("c")),
        (ValueError, "other dimensions", lambda: mesh["b", "c"]._flatten("a_c")),
        (RuntimeError, "without mesh_dim_names", lambda: init_device_mesh("cpu", (2, 4))._flatten()),
        (KeyError, "Invalid", lambda: mesh["a", "b"]["a_c"]),
    ]:
        with pytest.raises(error, match=match):
            call()


@in_world(8, 5)
def test_unflatten() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("w",))
    split = mesh._unflatten(0, (2, 2, 2), ABC)
    assert split.mesh.tolist() == cube().mesh.tolist() and split["b"].mesh.tolist() == [5, 7]
    assert split.mesh_dim_names == ABC and split == mesh._unflatten("w", (2, 2, 2), ABC)
    again = split._unflatten("c", (1, 2), ("x", "y"))
    assert again.shape == (2, 2, 1, 2) and again.coord == (1, 0, 0, 1) and again["x", "y"].mesh.tolist() == [[4, 5]]
    for error, match, call in [
        (ValueError, "do not divide", lambda: mesh._unflatten(0, (3, 2), ("x", "y"))),
        (ValueError, "out of range", lambda: mesh._unflatten(1, (8,), ("x",))),
        (ValueError, "is not in", lambda: mesh._unflatten("x", (8,), ("x",))),
        (RuntimeError, "same length", lambda: mesh._unflatten(0, (2, 4), ("x",))),
    ]:
        with pytest.raises(error, match=match):
            call()


@in_world(8, 5)
def test_concatenate() -> None:
    mesh = cube()
    assert DeviceMesh._concatenate([mesh["a"], mesh["c"]]) == mesh["a", "c"]
    turned = DeviceMesh._concatenate([mesh["c"], mesh["a"]])
    assert turned.mesh.tolist() == [[0, 4], [1, 5]] and turned.coord == (1, 1)
    assert turned["c"] == mesh["c"] and turned.comm((0, 1)).ranks == (0, 4, 1, 5)
    assert DeviceMesh._concatenate([mesh["a"], cube()["b"]]) == mesh["a", "b"]
    for error, match, meshes in [
        (RuntimeError, "overlapping", [mesh["a"], mesh["a", "b"]]),
        (RuntimeError, "different", [mesh["a"], init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))["x"]]),
        (RuntimeError, "without", [mesh["a"], init_device_mesh("cpu", (8,))]),
        (ValueError, "at least one", []),
    ]:
        with pytest.raises(error, match=match):
            DeviceMesh._concatenate(meshes)  # type: ignore[arg-type]


@in_world(8, 5)
def test_all_submeshes() -> None:
    parts = cube()._get_all_submeshes("b")
    assert [p.mesh.tolist() for p in parts] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [p.coord for p in parts] == [None, None, None, (0,)]


# values


@in_world(8, 5)
def test_equality() -> None:
    mesh = cube()
    assert mesh == cube() and hash(mesh) == hash(cube()) and len({mesh, cube()}) == 1
    assert mesh != init_device_mesh("cpu", (2, 2, 2)) and mesh != init_device_mesh(
        "cpu", (2, 2, 2), mesh_dim_names="xyz"
    )
    assert mesh != init_device_mesh("meta", (2, 2, 2), mesh_dim_names=ABC) and mesh != "mesh"
    assert DeviceMesh("cpu", [1, 0]) != DeviceMesh("cpu", [0, 1]) != DeviceMesh("cpu", [0, 2])
    assert init_device_mesh("cpu", (2, 4)) != init_device_mesh("cpu", (4, 2))
    with fake_world(8, rank=5):
        assert mesh != cube()


@in_world(8, 5)
def test_copies_and_pickles() -> None:
    mesh = cube()
    flat = mesh["a", "c"]._flatten()
    for m in (mesh, mesh["a", "c"], mesh["b"], flat, DeviceMesh("cpu", [3, 5, 1]), DeviceMesh("cpu", 5)):
        assert copy.deepcopy(m) is m and copy.copy(m) is m
        read = pickle.loads(pickle.dumps(m))
        assert read == m and hash(read) == hash(m) and read.coord == m.coord and repr(read) == repr(m)
        if m.ndim:
            assert read.comm(0).ranks == m.comm(0).ranks
    assert pickle.loads(pickle.dumps(mesh["a", "c"]))["c"] == mesh["c"]
    data = pickle.dumps(mesh)
    with fake_world(8, rank=2):
        assert pickle.loads(data).coord == (0, 1, 0)


def test_pickle_without_a_world() -> None:
    with fake_world(4):
        data = pickle.dumps(init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y")))
    with pytest.warns(UserWarning, match="has no groups"):
        read = pickle.loads(data)
    assert read.shape == (2, 2) and read.coord == (0, 0) and read.mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError):
        read.comm(0)


def test_pure_geometry() -> None:
    """Without a world: as a given rank sees it."""
    mesh = DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("x", "y"), _init_backend=False, _rank=3)
    assert mesh.coord == (1, 1) and mesh["x"].mesh.tolist() == [1, 3] and mesh.get_rank() == 3
    with pytest.raises(RuntimeError, match="not initialized"):
        mesh.get_group("x")
    with pytest.raises(RuntimeError, match="not initialized"):
        mesh.comm("x")
    with pytest.raises(RuntimeError, match="no world"):
        DeviceMesh("cpu", [0, 1], _init_backend=False)


@in_world(8, 5)
def test_current_mesh() -> None:
    with pytest.raises(RuntimeError, match="No device mesh is currently active!"):
        DeviceMesh.current()
    mesh, other = cube(), init_device_mesh("cpu", (8,))
    with pytest.raises(ZeroDivisionError), mesh as entered:
        assert entered is mesh is DeviceMesh.current() is as_mesh(None)
        with other:
            assert DeviceMesh.current() is other
        assert DeviceMesh.current() is mesh
        raise ZeroDivisionError
    with pytest.raises(RuntimeError):
        as_mesh(None)
    assert as_mesh(mesh) is mesh
    with pytest.raises(TypeError, match="is no DeviceMesh"):
        as_mesh("cpu")


# communicators


@in_world(8, 5)
def test_communicators() -> None:
    mesh = cube()
    assert mesh.comm("a") is mesh.comm("a") and mesh.comm((0, 2)) is mesh.comm((0, 2))
    assert mesh.comm(("a",)) is mesh.comm("a")
    for axes, ranks, position in [
        ("a", (1, 5), 1), (1, (5, 7), 0), (-1, (4, 5), 1), ((0,), (1, 5), 1), (("a", "c"), (0, 1, 4, 5), 3),
        ((2, 0), (0, 4, 1, 5), 3), ((0, 1, 2), tuple(range(8)), 5), ((1, 0), (1, 5, 3, 7), 1),
    ]:  # fmt: skip
        comm = mesh.comm(axes)  # type: ignore[arg-type]
        assert (comm.ranks, comm.rank, comm.size) == (ranks, position, len(ranks))
    assert mesh["b", "c"].comm((0, 1)).ranks == (4, 5, 6, 7)
    with pytest.raises(ValueError, match="twice"):
        mesh.comm((0, 0))
    with pytest.raises(RuntimeError, match="needs to know which"):
        mesh.comm()
    with pytest.raises(IndexError):
        mesh.comm(3)
    with pytest.raises(KeyError):
        mesh.comm("d")


@in_world(6, 4)
def test_permuted_ranks() -> None:
    mesh = DeviceMesh("cpu", [[5, 2, 4], [0, 3, 1]], mesh_dim_names=("x", "y"))
    assert mesh.coord == (0, 2) and mesh.comm("x").ranks == (4, 1) and mesh.comm("y").ranks == (5, 2, 4)
    assert mesh.comm((1, 0)).ranks == (5, 0, 2, 3, 4, 1) and mesh.comm((1, 0)).rank == 4
    assert mesh.get_local_rank("y") == 2 and mesh["y"].mesh.tolist() == [5, 2, 4]


@in_world(6, 5)
def test_ranks_outside() -> None:
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))
    assert mesh.coord is None and mesh.get_coordinate() is None and mesh.mesh.tolist() == [[0, 2], [1, 3]]
    assert not mesh._is_current_rank_part_of_mesh() and mesh["x"].coord is None and mesh["x"].shape == (2,)
    with pytest.raises(RuntimeError, match="in none of them"):
        mesh["x"].mesh  # noqa: B018
    with pytest.raises(IndexError, match="no local rank"):
        mesh.get_local_rank("x")
    for call in (mesh.comm, mesh.get_group):
        with pytest.raises(RuntimeError, match="has no group there"):
            call("x")


# process groups


def with_groups(rank: int, world: int) -> None:
    """On 4 ranks with groups: gloo processes or simulated ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    rows, columns = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
    ranks_of = dist.get_process_group_ranks
    assert ranks_of(mesh.get_group("y")) == rows and ranks_of(mesh.get_group(0)) == columns
    assert mesh.get_all_groups() == [mesh.get_group("x"), mesh.get_group("y")]
    assert mesh["y"].get_group() is mesh.get_group("y")
    flat = mesh._flatten()
    assert flat.get_group() is dist.group.WORLD and mesh.get_group("x_y") is dist.group.WORLD
    assert init_device_mesh("cpu", (4,)).get_group() is dist.group.WORLD
    permuted = DeviceMesh("cpu", [3, 1, 0, 2])
    assert ranks_of(permuted.get_group()) == [3, 1, 0, 2]
    assert dist.get_rank(permuted.get_group()) == permuted.get_local_rank() == [3, 1, 0, 2].index(rank)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh["y"].get_group())
    assert x.item() == sum(rows) == mesh.comm("y").all_reduce(torch.tensor([float(rank)])).item()
    # a rank outside need not take part, and ranks agree on names whatever groups they have
    part = DeviceMesh("cpu", [0, 2])
    assert (part.coord is None) == (rank % 2 == 1)
    if part.coord is not None:
        assert part.comm().all_reduce(torch.ones(1)).item() == 2
        assert DeviceMesh("cpu", [2, 0]).comm().all_gather(x, [(1,)] * 2)[0].item() == [1, 0, 5, 0][2]
    later = init_device_mesh("cpu", (2, 2))
    assert later.comm(1).all_reduce(torch.ones(1)).item() == 2
    assert [t.item() for t in later.comm((1, 0)).all_gather(torch.tensor([rank]), [(1,)] * 4)] == [0, 2, 1, 3]
    # from groups
    one = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert one.mesh.tolist() == [0, 1, 2, 3] and one.get_group() is dist.group.WORLD
    assert one.comm().all_reduce(torch.ones(1)).item() == 4
    row = DeviceMesh.from_group(mesh.get_group("y"), "cpu", mesh=rows, mesh_dim_names=("y",))
    assert row.mesh.tolist() == rows and row.get_group("y") is mesh.get_group("y")
    both = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", [[0, 1], [2, 3]], mesh_dim_names=("x", "y"))
    assert both == mesh and both.get_group("x") is mesh.get_group("x")
    assert both.comm((0, 1)).all_reduce(torch.ones(1)).item() == 4
    for match, call in [
        ("Invalid mesh", lambda: DeviceMesh.from_group(dist.group.WORLD, "cpu", [0, 1, 3, 2])),
        ("at least one", lambda: DeviceMesh.from_group([], "cpu")),
        ("Must pass mesh if", lambda: DeviceMesh.from_group(mesh.get_all_groups(), "cpu")),
        ("Must pass mesh_dim_names", lambda: DeviceMesh.from_group(mesh.get_all_groups(), "cpu", [[0, 1], [2, 3]])),
        ("ndim equal", lambda: DeviceMesh.from_group(mesh.get_all_groups(), "cpu", [0, 1], mesh_dim_names=("x",))),
        (
            "has ranks",
            lambda: DeviceMesh.from_group(
                mesh.get_all_groups()[::-1], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("x", "y")
            ),
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    assert [m.coord for m in mesh._get_all_submeshes("x")] == [(rank // 2,) if rank % 2 == i else None for i in (0, 1)]
    read = pickle.loads(pickle.dumps(mesh["y"]))
    assert read == mesh["y"] and read.get_group() is mesh.get_group("y")
    wide = DeviceMesh._concatenate([mesh["y"], mesh["x"]])
    assert wide.get_group("x") is mesh.get_group("x") and wide.comm((0, 1)).ranks == (0, 2, 1, 3)


def test_groups_on_simulated_ranks() -> None:
    simulate(4)(lambda: with_groups(dist.get_rank(), 4))


def gloo_groups_are_shared(rank: int, world: int) -> None:
    """Meshes over the same ranks share groups; an override makes its own."""
    first, second = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    assert first.get_group(0) is second.get_group("x") and first.comm((0, 1)).group is dist.group.WORLD
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        init_device_mesh("cpu", (2, 2))
    assert len(dist.distributed_c10d._world.pg_map) == before
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"), backend_override={"x": "gloo", 1: "fake"})
    assert dist.get_backend(own.get_group("y")) == "fake" and own.get_group("x") is first.get_group(0)
    assert own["y"].get_group() is own.get_group("y")
    flat = own._flatten("all", "fake")
    assert dist.get_backend(flat.get_group()) == "fake" and dist.get_backend(own.get_group("all")) == "fake"
    dist.destroy_process_group(first.get_group(0))
    third = init_device_mesh("cpu", (2, 2))
    assert third.comm(0).all_reduce(torch.ones(1)).item() == 2


def gloo_ranks_differ_in_equality(rank: int, world: int) -> None:
    """Equality is a global fact: the same answer on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    answers = [mesh["y"] == mesh["y"], mesh["y"] == DeviceMesh("cpu", [0, 1], mesh_dim_names=("y",))]
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, answers)
    assert everyone == [[True, False]] * world


def gloo_torch_meshes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    def engine() -> list[str]:
        return [name for name in sys.modules if name.startswith("torch.distributed.tensor")]

    theirs = torch_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    flat = theirs._flatten()
    part, before = theirs["y"], engine()  # torch 2.14 loads some of its engine to shard its mesh, 2.13 none
    ours = DeviceMesh.from_torch(theirs)
    assert as_mesh(theirs) is ours and ours == init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    assert ours.get_group("x") is theirs.get_group("x") and as_mesh(part) == ours["y"]
    assert as_mesh(part).get_group() is part.get_group()
    assert as_mesh(flat).get_group() is flat.get_group() and as_mesh(flat).coord == (rank,)
    assert as_mesh(part).comm().all_reduce(torch.ones(1)).item() == 2
    assert engine() == before


@pytest.mark.processes
def test_groups_on_gloo() -> None:
    run_ranks(4, [gloo_torch_meshes, with_groups, gloo_groups_are_shared, gloo_ranks_differ_in_equality]).check()


def test_torch_mesh_under_the_fake_group() -> None:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    theirs = torch_mesh("cpu", (2, 2, 2), mesh_dim_names=ABC)
    ours = as_mesh(theirs)
    assert ours == cube() and ours.coord == (0, 0, 1)
    flat = theirs["a", "c"]._flatten()
    assert as_mesh(flat).mesh.tolist() == [0, 1, 4, 5] and as_mesh(flat) == ours["a", "c"]._flatten()
    assert as_mesh(TorchMesh("cpu", [3, 1, 2])).coord == (1,)
    assert as_mesh(TorchMesh("cpu", [3, 2])).coord is None
    with pytest.raises(TypeError, match="from_torch takes"):
        DeviceMesh.from_torch(ours)
    assert cube().comm("a").all_reduce(torch.ones(2)).shape == (2,)
    assert [tuple(t.shape) for t in cube().comm((0, 1)).all_gather(torch.ones(1), [(1,), (2,), (3,), (0,)])] == [
        (1,), (2,), (3,), (0,)
    ]  # fmt: skip


def test_the_default_group_is_made_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in [("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]:
        monkeypatch.setenv(name, str(value))
    mesh = init_device_mesh("cpu", (1,))
    assert dist.is_initialized() and mesh.get_group() is dist.group.WORLD and mesh.coord == (0,)
    dist.destroy_process_group()


def test_cuda_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_RANK decides; without it the rank does, with a warning; a device chosen before stays."""
    from dtensor.comm.world import World
    from dtensor.mesh.arguments import choose_device

    chosen: list[int] = []
    state = {"initialized": False, "count": 4}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state["initialized"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: state["count"])
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    choose, world = choose_device, World("c10d", 6, 8, "c10d")
    with pytest.warns(UserWarning, match="takes cuda:2"):
        choose("cuda", world)
    monkeypatch.setenv("LOCAL_RANK", "3")
    choose("cuda", world)
    choose("cpu", world)
    state["initialized"] = True
    choose("cuda", world)
    assert chosen == [2, 3]
    state.update(initialized=False, count=3)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="homogeneous"):
        choose("cuda", world)
    state["count"] = 0
    choose("cuda", world)
    assert chosen == [2, 3]


def test_backends_of_devices() -> None:
    from dtensor.mesh.process_groups import GroupTable

    table = GroupTable()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    default = dist.distributed_c10d._get_default_group()
    assert table.get([0, 1, 2, 3], "cpu") is default and table.get([0, 2], "cpu") is table.get([0, 2], "cpu")
    assert table.get([2, 0, 1, 3], "cpu") is not default
    world = dist.distributed_c10d._world
    for backend, device, expected in [
        ("gloo", "cuda", "nccl"), ("nccl", "cpu", "gloo"), ("gloo", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", None),
    ]:  # fmt: skip
        saved = world.pg_map[default]
        world.pg_map[default] = (backend, saved[1])
        assert table._backend(default, device) == (expected or backend)
        world.pg_map[default] = saved


def test_a_bound_default_group_is_not_split() -> None:
    """Groups off the world's members only, also where the default group is bound to a device; it stays bound."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    default = dist.distributed_c10d._get_default_group()
    default.bound_device_id = torch.device("cuda", 0)
    group = init_device_mesh("cpu", (2, 2)).get_group(0)
    assert group.bound_device_id is None and default.bound_device_id == torch.device("cuda", 0)
    assert dist.get_process_group_ranks(group) == [0, 2]


def test_imports_leave_torchs_dtensor_out() -> None:
    code = (
        "import sys, dtensor.mesh.device_mesh, dtensor.simulate, torch.distributed._functional_collectives\n"
        "assert not [m for m in sys.modules if m.startswith('torch.distributed.tensor')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("async_op", [False, True])
def test_on_torchs_fake_group_a_rank_may_send_nothing(async_op: bool) -> None:
    """As in a redistribution that reduces pending parts elsewhere; the group itself refuses it, but in 2.11."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    comm = init_device_mesh("cpu", (4,)).comm(0)
    if torch.__version__ >= "2.12":
        with pytest.raises(RuntimeError, match="inputBuffer is empty"):
            dist.all_to_all_single(torch.empty(6), torch.empty(0), [0, 2, 4, 0], [0] * 4)
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        got = comm.all_to_all_flat(torch.empty(0, dtype=dtype), [0] * 4, [0, 2, 4, 0], async_op=async_op)
        got = got.wait() if isinstance(got, Pending) else got
        assert got.shape == (6,) and got.dtype is dtype
        parts = comm.all_to_all([torch.empty(0, 2, dtype=dtype)] * 4, [(0, 2), (1, 2), (2, 2), (0, 2)])
        assert [p.shape for p in parts] == [(0, 2), (1, 2), (2, 2), (0, 2)]


def test_a_mesh_takes_attributes_that_are_no_part_of_its_value() -> None:
    from unittest import mock

    with fake_world(4):
        mesh, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y")) for _ in range(2))
        before = hash(mesh)
        mesh.note = 1  # type: ignore[attr-defined]
        assert mesh == other and hash(mesh) == hash(other) == before and not hasattr(mesh["x"], "note")
        with mock.patch.object(mesh, "get_rank", return_value=7):
            assert mesh.get_rank() == 7
        assert mesh.get_rank() == 0
